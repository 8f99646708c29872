"""An update of Qwen3-0.6B's shape in all its weights, on two completions of 16,384 tokens with their prompts.

Weights and optimizer state are float32, products bfloat16. The least memory comes from computing whole layers again
("layer"), the least time from keeping the products with weights ("products").
"""

from __future__ import annotations

import dataclasses
import functools

import iteration_work
import shapes
import update
from outcome import Figures, Measurements

_LENGTHS = dict(prompt_tokens=128, new_tokens=16_256)


def measurements(tiny: bool) -> Measurements:
    """The update, by what the backward pass computes again."""
    return {
        f"0.6B, update, remat {remat}": functools.partial(long_update, remat, tiny) for remat in ("layer", "products")
    }


def long_update(remat: str, tiny: bool) -> Figures:
    """Seconds, tokens per second, utilisation and peak of the compiled step of a run."""
    case = shapes.case("0.6B", tiny, prompts=2, group=1, **(dict(prompt_tokens=8, new_tokens=6) if tiny else _LENGTHS))
    config = dataclasses.replace(
        iteration_work.decoder_config(case), model_type="qwen3", qkv_bias=False, qk_norm="head"
    )
    return update.ours(case, tiny, config, remat=remat)
