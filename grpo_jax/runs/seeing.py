"""What a run's policy sees with: its folder's processor, its tower, and the way in for pictures drawn in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from grpo_jax.config import Config
from grpo_jax.config.named import own_package
from grpo_jax.errors import UserError
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import gather
from grpo_jax.models.variables import VISUAL
from grpo_jax.models.vision.pictures import Pictures, pack_pictures, same_size
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.encoding import ImageProcessor, load_image_processor, prepare_rows
from grpo_jax.rollout.pictures import source_of


def image_processor_of(config: Config, loaded: Any) -> Callable[[], ImageProcessor] | None:
    """What loads the processor of the policy's folder, once; None for a policy that sees no pictures."""
    vision = loaded.config.vision
    if vision is None:
        return None
    return functools.cache(lambda: load_image_processor(loaded.path, vision, config.data.picture_size))


def make_see(policy: Policy) -> Callable[[Any, Any], tuple[Any, Any]]:
    """see(variables, `Pictures`) → their states, and what the update takes of them.

    A frozen tower's states are what the update takes; one that is trained, or has adapters, sees them again.
    """
    compiled = jax.jit(policy.encode_images)

    def see(variables: Any, pictures: Any) -> tuple[Any, Any]:
        states = gather(compiled(variables, pictures), policy.mesh)
        frozen = VISUAL in variables and VISUAL not in variables.get("lora", {})
        return states, states if frozen else pictures

    return see


def make_prepare(
    image_processor: Callable[[], ImageProcessor], device: jax.Device | None = None
) -> Callable[[Any], Pictures]:
    """prepare(pictures) → `Pictures` [N, 1, ..], one in each row.

    Pictures drawn in torch, float [N, 3, H, W] in [0, 1], are prepared where they are and handed over by dlpack: the
    same memory where the policy's device is theirs, one copy where it is another. Anything else that a row of the data
    may hold, as a list, goes through the folder's processor on the host.

    Args:
        image_processor: Of `image_processor_of`; asked at the first call.
        device: The policy's; None for where JAX sees the pictures.
    """

    def prepare(pictures: Any) -> Pictures:
        processor = image_processor()
        if not hasattr(pictures, "detach"):
            return _on_the_host(pictures, processor)
        patches, grid = own_package("bridges", "pixels").patches_of(pictures, processor.settings)
        return same_size(own_package("bridges", "dlpack").to_jax(patches.unsqueeze(1), device), grid, processor.vision)

    return prepare


def _on_the_host(pictures: Sequence[Any], processor: ImageProcessor) -> Pictures:
    try:
        rows = [Row(place, "", pictures=(source_of(picture, None),)) for place, picture in enumerate(pictures)]
    except ValueError as error:
        raise UserError(f"pictures: {error}") from error
    packed = pack_pictures(prepare_rows(rows, processor), processor.vision)
    if packed is None:
        raise ValueError("pictures: expected at least one")
    return packed
