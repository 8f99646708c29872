"""Folders that look right and are not: weights and adapters with NaN, tokenizers that panic, names no folder has."""

import jax
import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from support import tiny_models  # noqa: E402

from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.models import hf  # noqa: E402
from grpo_jax.models.hf.peft import load_adapters, save_adapters  # noqa: E402
from grpo_jax.models.lora import LoraConfig, init_adapters  # noqa: E402


def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture
def qwen(tmp_path):
    return tiny_models.causal_lm(tmp_path / "qwen", "qwen2")


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("model.norm.weight", float("nan"), torch.float32),
        ("model.layers.1.mlp.up_proj.weight", float("inf"), torch.bfloat16),
        ("model.embed_tokens.weight", -float("inf"), torch.float32),
    ],
)
def test_weights_that_are_not_finite_are_refused(qwen, name, value, dtype):
    stored = {key: tensor.to(dtype) for key, tensor in tensors(qwen).items()}
    stored[name].view(-1)[3] = value
    save_file(stored, qwen / "model.safetensors")
    for param_dtype in (None, "float32", "float16"):
        with pytest.raises(UserError, match=f"{name} holds NaN or infinite values: copy .* again"):
            hf.load_folder(qwen, param_dtype=param_dtype, tokenizer=False)


def test_weights_that_a_dtype_cannot_hold_are_refused(qwen):
    stored = tensors(qwen)
    stored["model.norm.weight"][0] = 1e5
    save_file(stored, qwen / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight holds values that float16 cannot"):
        hf.load_folder(qwen, param_dtype="float16")
    assert hf.load_folder(qwen, param_dtype="bfloat16").params["norm"]["scale"][0] > 9e4


def test_adapters_that_are_not_finite_are_refused(tmp_path, qwen):
    loaded, lora = hf.load_folder(qwen), LoraConfig(2, 4.0, ("q_proj",))
    adapters = init_adapters(loaded.params, jax.random.key(0), lora)
    save_adapters(tmp_path / "adapters", adapters, lora, loaded.config, base="base")
    path = tmp_path / "adapters" / "adapter_model.safetensors"
    stored = load_file(path)
    name = next(name for name in stored if "layers.1" in name)
    stored[name][0, 0] = float("nan")
    save_file(stored, path)
    with pytest.raises(UserError, match=f"{name} holds NaN or infinite values: copy .* again"):
        load_adapters(tmp_path / "adapters", loaded.config)


def test_a_panic_in_a_tokenizer_is_one_line(qwen, monkeypatch):
    class PanicException(BaseException):
        """What a panic of Rust comes as."""

    def panic(*_, **__):
        raise PanicException("index out of bounds: the len is 0 but the index is 7\n and where")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(UserError, match=r"cannot load the tokenizer in .*index is 7; copy its files again$"):
        hf.load_folder(qwen)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "~nobody_here/x/y", "a/" + "b" * 400, "org/mo\ndel", ""])
def test_names_that_no_folder_has(name):
    with pytest.raises(UserError, match="is not on this machine: give the path of a local folder"):
        hf.load_folder(name)
