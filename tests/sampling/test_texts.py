"""`generate` writes the texts of transformers."""

from types import SimpleNamespace

import jax
import pytest

pytest.importorskip("torch")

from support.tiny_models import causal_lm
from support.torch_reference import greedy_answers
from transformers import AutoModelForCausalLM

from grpo_jax import generate, load_policy, make_config
from grpo_jax.models.hf.folder import load_tokenizer
from grpo_jax.runs.sft import supervised_tokens
from grpo_jax.sampling.samplers import completion_tokens

PROMPTS = ["What is rain?", "a red ring"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return causal_lm(tmp_path_factory.mktemp("texts") / "policy", seed=3)


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(folder)


def test_greedy_texts_are_those_of_transformers(policy, folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"max_new_tokens": 12, "eos_token_id": list(policy.eos_ids), "pad_token_id": 0}
    expected = [[text] for text in greedy_answers(model, folder, PROMPTS, **options)]
    assert generate(policy, PROMPTS, max_new_tokens=12) == expected


def test_a_supervised_text_ends_as_the_chat_template_ends_a_turn(folder):
    """In Gemma's and Phi's folders another token than the tokenizer's own EOS."""
    tokenizer = load_tokenizer(folder)
    own = tokenizer.eos_token_id
    other = next(token for token in tokenizer.all_special_ids if token != own)
    mark = tokenizer.convert_ids_to_tokens(other)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}" + mark + "{% endfor %}"

    def last(*eos_ids, plain=False, gap=False):
        return completion_tokens(tokenizer, "a red ring", eos_ids, plain=plain, gap=gap)[-1]

    assert last(own, other) == last(other, own) == other and last(own, other, plain=True, gap=True) == last(own) == own
    assert last(own, other, plain=True) == own  # also where the prompt ends with the gap
    tokenizer.chat_template = "{{ raise_exception('no answers') if messages[1:] else messages[0]['content'] }}"
    assert last(other, own) == own and last(other) == other


@pytest.mark.parametrize("prompt", ["Colour:", "Colour: "])
def test_a_text_that_continues_its_prompt_ends_with_the_tokenizers_own_eos(folder, prompt):
    """Whether or not the prompt ends with a space."""
    tokenizer = load_tokenizer(folder)
    own = tokenizer.eos_token_id
    other = next(token for token in tokenizer.all_special_ids if token != own)
    mark = tokenizer.convert_ids_to_tokens(other)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}" + mark + "{% endfor %}"
    loaded = SimpleNamespace(tokenizer=tokenizer, eos_ids=(own, other))
    sampling = {"max_new_tokens": 32}
    for form, end in (("append", own), ("rewrite", other)):
        config = make_config(task="prompt_enhancement", data={"form": form}, sampling=sampling)
        policy, task_data = SimpleNamespace(folder=loaded), SimpleNamespace(choices=None)
        ctx = SimpleNamespace(config=config, task_data=task_data, policy=policy)
        assert supervised_tokens(ctx, prompt, "a red ring")[-1] == end


def test_completions_differ_by_seed_and_place(policy):
    settings = {"completions": 3, "max_new_tokens": 12, "temperature": 1.0, "top_p": 0.99}
    written = generate(policy, PROMPTS, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", None)  # nothing is made anew
        assert generate(policy, PROMPTS, **settings) == written
    assert [len(group) for group in written] == [3, 3] and len({text for group in written for text in group}) == 6
    assert generate(policy, PROMPTS, seed=1, **settings) != written


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ("one text", {}, ValueError, "prompts: expected a list of at least one text, got .one text."),
        ([], {}, ValueError, "prompts: expected a list of at least one text"),
        (PROMPTS, {"temperature": -1.0}, ValueError, "temperature"),
        (PROMPTS, {"top": 3}, TypeError, "top"),
    ],
)
def test_mistakes_are_told(policy, prompts, options, error, message):
    with pytest.raises(error, match=message):
        generate(policy, prompts, **options)
