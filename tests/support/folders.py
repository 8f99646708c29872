"""A policy's folder, read with its weights."""

from typing import Any, NamedTuple

from grpo_jax.models.hf import folder as hf


class Loaded(NamedTuple):
    """The result of `hf.read_folder`, with the parameters of decoder and vision tower."""

    config: Any
    path: Any
    tokenizer: Any
    eos_ids: tuple[int, ...]
    pad_id: int
    params: dict[str, Any]
    visual: dict[str, Any] | None


def load_folder(folder, *, param_dtype="float32", tokenizer=True, vision=False) -> Loaded:
    """Read a folder; None keeps its type of weights."""
    read = hf.read_folder(folder, tokenizer=tokenizer)
    params = hf.load_weights(read, param_dtype=param_dtype)
    sees = vision and read.config.vision is not None
    visual = hf.load_weights(read, param_dtype=param_dtype, tower=True)["visual"] if sees else None
    return Loaded(read.config, read.path, read.tokenizer, read.eos_ids, read.pad_id, params, visual)
