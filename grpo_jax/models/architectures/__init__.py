"""Table of model architectures: Hugging Face's model_type → `Architecture`.

To add one, write a file that ends in its `Architecture`, and add a row here. `gpt2` is a complete example to copy:
config, layer, names. `models.layers` specifies each part, and has projections, norms and activations.
"""

from grpo_jax.models.architectures import gpt2, llama
from grpo_jax.models.architectures import llama_variants as variants
from grpo_jax.models.architectures.gpt2 import GPT2Config
from grpo_jax.models.architectures.llama import DecoderConfig
from grpo_jax.models.hf_config import ConfigJson, expect
from grpo_jax.models.layers import Architecture

ModelConfig = DecoderConfig | GPT2Config

_TABLE = (
    llama.LLAMA_ARCHITECTURE,
    variants.SMOLLM3_ARCHITECTURE,
    variants.PHI3_ARCHITECTURE,
    variants.GEMMA2_ARCHITECTURE,
    variants.GEMMA3_ARCHITECTURE,
    llama.QWEN_VL_ARCHITECTURE,
    gpt2.GPT2_ARCHITECTURE,
)
ARCHITECTURES: dict[str, Architecture] = {
    model_type: architecture for architecture in _TABLE for model_type in architecture.model_types
}


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a decoder's config."""
    return ARCHITECTURES[config.model_type]


def read_model_config(fields: ConfigJson) -> ModelConfig:
    """Read the contents of a ``config.json``; ValueError names a field that is missing or not supported."""
    model_type = fields.get("model_type")
    known = isinstance(model_type, str) and model_type in ARCHITECTURES
    expect(known, "model_type", f"one of {tuple(ARCHITECTURES)}", model_type)
    return ARCHITECTURES[model_type].read(fields)
