"""Read and write policies as Hugging Face folders: weights, adapters, tokenizers, exports."""

from grpo_jax.models.hf.chat import Tokenizer
from grpo_jax.models.hf.folder import (
    PolicyFolder,
    load_tokenizer,
    load_weights,
    model_config,
    read_folder,
    require_folder,
    resolve_folder,
    save_folder,
)
from grpo_jax.models.hf.weights import shapes

__all__ = [
    "PolicyFolder",
    "Tokenizer",
    "load_tokenizer",
    "load_weights",
    "model_config",
    "read_folder",
    "require_folder",
    "resolve_folder",
    "save_folder",
    "shapes",
]
