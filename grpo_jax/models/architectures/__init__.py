"""The model families, one table: Hugging Face's model_type → what the decoder and its folders know of it.

A new family is a file that ends in its `Family`, and its row here.
"""

from grpo_jax.models.architectures import gemma, gpt2, llama, phi, qwen3_moe, smollm
from grpo_jax.models.architectures.family import Family
from grpo_jax.models.architectures.gpt2 import GPT2Config
from grpo_jax.models.architectures.llama import DecoderConfig
from grpo_jax.models.hf_config import Fields, expect

ModelConfig = DecoderConfig | GPT2Config

_FAMILIES = (
    *(llama.FAMILY, smollm.FAMILY, phi.FAMILY, qwen3_moe.FAMILY, gemma.FAMILY, gemma.GEMMA3_FAMILY),
    *(llama.QWEN_VL_FAMILY, gpt2.FAMILY),
)
FAMILIES: dict[str, Family] = {model_type: family for family in _FAMILIES for model_type in family.model_types}


def family_of(config: ModelConfig) -> Family:
    """The family of a decoder's config."""
    return FAMILIES[config.model_type]


def read_config(fields: Fields) -> ModelConfig:
    """Read the contents of a ``config.json``; ValueError names a field that is missing or not supported."""
    model_type = fields.get("model_type")
    known = isinstance(model_type, str) and model_type in FAMILIES
    expect(known, "model_type", f"one of {tuple(FAMILIES)}", model_type)
    return FAMILIES[model_type].read(fields)
