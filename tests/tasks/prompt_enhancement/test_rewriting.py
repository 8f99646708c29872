"""The parser from a policy's answer to the rendered prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import chat_tokenizer

from grpo_jax.config.sections import DataSection
from grpo_jax.rollout.encoding import ParsedCompletion, continued, make_decode
from grpo_jax.tasks.rewriting import parse_rewrite

CHAT_ANSWERS = [
    # Qwen2.5-Instruct
    ("Here is the rewritten prompt: a fox in snow", "a fox in snow"),
    ("Rewritten text-to-image prompt for Stable Diffusion:\n\nA red fox in deep snow.", "A red fox in deep snow."),
    ("A red fox in snow.\n\nThis version adds the setting and keeps the subject.", "A red fox in snow."),
    ("A red fox,\nsitting in deep snow,\ngolden hour, 35mm", "A red fox, sitting in deep snow, golden hour, 35mm"),
    ("### Rewritten Prompt:\nA red fox in deep snow", "A red fox in deep snow"),
    ("```plaintext\nA red fox in deep snow\n```", "A red fox in deep snow"),
    (
        '```json\n{\n  "prompt": "A red fox in deep snow",\n  "negative_prompt": "blurry, text"\n}\n```',
        "A red fox in deep snow",
    ),
    ('{"original": "fox", "rewritten_prompt": "a \\"red\\" fox"}', 'a "red" fox'),
    ('{"prompt": "A red fox in deep', "A red fox in deep"),
    ("改写后的提示：一只红狐狸坐在雪地里，金色的阳光", "一只红狐狸坐在雪地里，金色的阳光"),
    ("很抱歉，我无法满足您的请求。", None),
    # Qwen3, DeepSeek-R1
    (
        "<think>\nThe user wants a fox. Prompt: maybe snow?\n</think>\n\nA red fox in deep snow",
        "A red fox in deep snow",
    ),
    ("Okay, the user wants a fox.\n</think>\n\n**Prompt:** A red fox", "A red fox"),
    ("<think>\nOkay, let me think about the fox", None),
    ("<thinking>short</thinking><prompt>A red fox</prompt>", "A red fox"),
    # tags that a system prompt asks for
    ("Light and season help.\n<prompt>A red fox</prompt>\nI added light.", "A red fox"),
    ("<reasoning>\nIt needs light.\n</reasoning>\n<answer>\nA red fox\n</answer>", "A red fox"),
    ("<reasoning>\nIt needs light, and", None),
    ("I write it in <prompt> tags.\n<prompt>A red fox", "A red fox"),
    ("<original_prompt>fox</original_prompt><rewritten_prompt>A red fox</rewritten_prompt>", "A red fox"),
    ("A red fox\n<negative_prompt>blurry</negative_prompt>", "A red fox"),
    # Llama 3
    (
        'Here is a rewritten version of the prompt:\n\n"A majestic fox in snow."\n\nI added detail.',
        "A majestic fox in snow.",
    ),
    ("**Prompt:** A red fox in deep snow\n\n**Style:** Watercolor", "A red fox in deep snow"),
    ("**Title:** Winter Fox\n\n**Prompt:** A red fox in deep snow", "A red fox in deep snow"),
    ("I can't help with that.", None),
    # GPT-4o
    ("Okay, a fox", "a fox"),
    (
        "Certainly! Here's a refined version of it:\n\n---\n\n*A red fox in deep snow, cinematic.*\n\n---",
        "A red fox in deep snow, cinematic.",
    ),
    ("**Enhanced Prompt**:\n“A red fox in deep snow.”", "A red fox in deep snow."),
    (
        '"A red fox in deep snow, golden hour." This version adds light and season.',
        "A red fox in deep snow, golden hour.",
    ),
    ("I'm sorry, but I can't assist with that request.", None),
    ("Unfortunately, I'm unable to create that kind of content.", None),
    # Gemma
    (
        "Some options:\n\n**Option 1 (Vivid & Moody):**\n\n> A red fox in mist.\n\n**Option 2 (Concise):**\n\n> A",
        "A red fox in mist.",
    ),
    ("Okay, I understand. I am programmed to be a safe AI assistant. I cannot fulfill your request.", None),
    ("**Original prompt:** fox\n**Improved prompt:** a red fox in snow", "a red fox in snow"),
    # Mistral
    ("I'd be happy to help! Here's the rewritten prompt:\n\nA red fox in deep snow", "A red fox in deep snow"),
    ("I've enhanced your prompt with more detail.\n\nA red fox in deep snow", "A red fox in deep snow"),
    ("1. A red fox in deep snow.\n2. A fox at night.\n3. A fox den.", "A red fox in deep snow."),
    ("Voici le prompt amélioré : un renard roux dans la neige", "un renard roux dans la neige"),
    ("Aquí tienes el prompt mejorado:\n\nUn zorro rojo en la nieve", "Un zorro rojo en la nieve"),
    ("Hier ist der verbesserte Prompt: Ein Rotfuchs im Schnee", "Ein Rotfuchs im Schnee"),
    ("Je suis désolé, mais je ne peux pas répondre à cette demande.", None),
    ("Lo siento, pero no puedo ayudar con eso.", None),
    ("Es tut mir leid, aber dabei kann ich nicht helfen.", None),
    # SmolLM
    ("Sure, I'd be happy to help! Please provide the prompt you would like me to rewrite.", None),
    ("The rewritten prompt is: a red fox in snow", "a red fox in snow"),
    ("As an AI language model, I don't have the ability to draw.", None),
    # negative prompts
    ("A red fox in deep snow\nNegative prompt: blurry, text", "A red fox in deep snow"),
    ("Negative prompt: blurry\nPrompt: a red fox", "a red fox"),
    ("Negative prompt: blurry, text", None),
    ("**Positive prompt:**\n```\nA red fox\n```\n**Negative prompt:**\n```\nblurry\n```", "A red fox"),
    # what only looks like a refusal, a remark or a label
    ("As an AI robot painting, oil", "As an AI robot painting, oil"),
    ("I can't help falling in love, vinyl cover", "I can't help falling in love, vinyl cover"),
    ("I'm sorry, Dave, a red camera eye on a wall", "I'm sorry, Dave, a red camera eye on a wall"),
    ("Okay sign in neon, on brick", "Okay sign in neon, on brick"),
    ("Great wave off Kanagawa: woodblock print", "Great wave off Kanagawa: woodblock print"),
    ("Here is a neon sign that reads: OPEN", "Here is a neon sign that reads: OPEN"),
    ("Let me in, graffiti on a door", "Let me in, graffiti on a door"),
    ("a command prompt: green letters on black", "a command prompt: green letters on black"),
    ("film negative, prompt delivery van", "film negative, prompt delivery van"),
    ("The Answer, movie poster", "The Answer, movie poster"),
    ("a poster that says:", "a poster that says:"),
    ("**A red fox** in *deep* snow", "A red fox in *deep* snow"),
    # drawn all the same: what follows a disclaimer, or a remark
    ("I can't create images, but here's a prompt you can use:\n\nA red fox in snow", "A red fox in snow"),
    ('To get a better image, try this prompt: "a red fox"', "a red fox"),
    ("Below is a prompt that captures the mood.\n\nA red fox", "A red fox"),
    ("/imagine prompt: a red fox --ar 16:9", "a red fox --ar 16:9"),
    # more refusals, and more that look like one
    ("I can't do this anymore, tired office worker", "I can't do this anymore, tired office worker"),
    ("here is a map of the old version of Rome: engraving", "here is a map of the old version of Rome: engraving"),
    ('a shop window {"OPEN"}, neon', 'a shop window {"OPEN"}, neon'),
    # short ones
    ("  a   fox\tin snow \n", "a fox in snow"),
    ('"a fox, snow."', "a fox, snow."),
    ("“a fox”", "a fox"),
    ('"a fox".', "a fox."),
    ('"a fox in', "a fox in"),
    ("'a dog's life'", "a dog's life"),
    ("'a dog' and 'a cat'", "'a dog' and 'a cat'"),
    ('"Hello" sign on a wall', '"Hello" sign on a wall'),
    ("a fox, 'sharp'", "a fox, 'sharp'"),
    ("Enhanced prompt: Prompt: a fox", "a fox"),
    ("- a fox", "a fox"),
    ("3 foxes", "3 foxes"),
    ("...\na fox", "a fox"),
    ("狐", "狐"),
    # nothing that can be drawn
    *((written, None) for written in ("", " \n", '""', "...!", "Here is the prompt:", "Prompt:", "```")),
]
"""What chat models write when they are asked for a better prompt, and what is drawn: None for the user's own prompt."""


@pytest.mark.parametrize(("written", "drawn"), CHAT_ANSWERS)
def test_answers_of_chat_models_are_read(written, drawn):
    expected = ParsedCompletion("the user's", False) if drawn is None else ParsedCompletion(drawn, True)
    assert parse_rewrite(written, "the user's") == expected


def test_a_thought_that_the_template_opens_and_no_completion_ends_is_no_answer():
    """As with Qwen3-Thinking and R1, whose templates end with <think>."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n", "assistant\n<think>\n")
    decode, thought = make_decode(tokenizer, DataSection(), read=parse_rewrite), "Okay, so the user wants a fox"
    for written, parsed in ((thought, ("a fox", False)), (f"{thought}</think>A red fox", ("A red fox", True))):
        assert decode(tokenizer(written)["input_ids"], "a fox") == (written, parsed)


@given(st.text(alphabet=st.sampled_from("a1 \n\"'`“”*:.-#>Prompt<think>/ü"), max_size=40))
def test_a_valid_rewrite_is_one_line_with_words(written):
    rewrite = parse_rewrite(written, "P!")
    if not rewrite.valid:
        assert rewrite.text == "P!"
    else:
        assert "\n" not in rewrite.text and rewrite.text == rewrite.text.strip()
        assert any(c.isalnum() for c in rewrite.text)


def test_append_is_the_prompt_and_the_first_line_of_its_continuation():
    assert continued(", in snow\nNext", "a fox") == ParsedCompletion("a fox, in snow", True)
    assert continued("es in snow", "a fox") == ParsedCompletion("a foxes in snow", True)
    for nothing in ("", " .", "\nin snow"):
        assert continued(nothing, "a fox") == ParsedCompletion("a fox", False)
