"""The language models of Qwen-VL: Llama's layers, in folders that hold a vision tower beside them."""

from grpo_jax.models.families import llama
from grpo_jax.models.families.llama_config import VISION_TYPES

# Hub folders name the language model's tensors as a model of text would; the rest is what newer ones use.
_PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "")

FAMILY = llama.FAMILY._replace(
    model_types=VISION_TYPES,
    naming=llama.NAMING._replace(prefixes=_PREFIXES, beside=("visual.", "model.visual.")),
)
