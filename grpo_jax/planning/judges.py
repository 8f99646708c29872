"""What the judges will need: weights from their config files, working memory from rules that are said here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_jax.config import RendererSection, ScorerSection

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

PUBLISHED_PIPELINES: dict[str, tuple[dict[str, int], tuple[int, ...], int]] = {
    "stabilityai/stable-diffusion-3-medium-diffusers": (
        {
            "transformer": 2_084_951_104,
            "vae": 83_819_683,
            "text_encoder": 123_650_304,
            "text_encoder_2": 694_659_840,
            "text_encoder_3": 4_762_310_656,
        },
        (128, 256, 512, 512),
        1024,
    ),
}
"""Numbers in each model, widths of the VAE's blocks and edge of a picture, of pipelines on the hub."""

PUBLISHED_CLIPS: dict[str, int] = {"ViT-B-32": 151_277_313, "ViT-L-14": 427_616_513}
"""Numbers in open_clip's models."""

PUBLISHED_POLICIES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2-VL-7B-Instruct": {
        "model_type": "qwen2_vl",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, "hidden_size": 3584},
    },
}
"""What their config.json says, for planning where there is no connection."""


class Row(NamedTuple):
    """A line of a plan: what, how many bytes, why, and whether they count (of two that take turns one does)."""

    name: str
    bytes: int
    note: str = ""
    counted: bool = True


def renderer_rows(section: RendererSection, sizes: dict[str, int], widths: tuple[int, ...], edge: int) -> list[Row]:
    """Memory of the diffusion model.

    Its working memory is that of the VAE, which is the most: three pictures of the second widest features at full
    size, those before, within and after its last block.

    Args:
        section: Its config.
        sizes: Numbers in each of its models.
        widths: Of the VAE's blocks.
        edge: Width and height of a picture.
    """
    item = ITEM_BYTES[section.dtype]
    used = {name: size for name, size in sizes.items() if section.use_t5 or name != "text_encoder_3"}
    texts = sum(size for name, size in used.items() if name.startswith("text_encoder"))
    features = 3 * section.batch_size * widths[:2][-1] * edge * edge * item
    with_t5 = "with T5" if "text_encoder_3" in used else "without T5"
    return [
        Row("transformer and VAE", item * (used["transformer"] + used["vae"]), section.dtype),
        Row("text encoders", item * texts, f"{section.dtype}, {with_t5}"),
        Row("drawing", features, f"estimate: {section.batch_size} pictures of {edge} x {edge} in the VAE"),
        Row("picture cache", section.cache_megabytes * 2**20, "renderer.cache_megabytes, once full"),
    ]


def scorer_rows(section: ScorerSection, count: Callable[[str], int]) -> list[Row]:
    """Memory of CLIP, and of the second that is only watched; its activations are a few tens of megabytes."""
    item = ITEM_BYTES[section.dtype]
    rows = [Row("CLIP", item * count(section.model), section.dtype)]
    if section.watch_model:
        rows.append(Row("watched CLIP", item * count(section.watch_model), section.dtype))
    return [*rows, Row("scoring", 2**28, "allowance")]


def vision_size(vision: dict[str, Any]) -> int:
    """Numbers in Qwen2-VL's vision tower: patches, blocks of two norms, attention and MLP, and the merger."""
    width, patch = vision["embed_dim"], vision["patch_size"]
    inner, merged = int(width * vision["mlp_ratio"]), 4 * width
    block = 4 * width + (4 * width * width + 4 * width) + (2 * width * inner + inner + width)
    merger = 2 * width + merged * merged + merged + merged * vision["hidden_size"] + vision["hidden_size"]
    return 3 * 2 * patch * patch * width + vision["depth"] * block + merger
