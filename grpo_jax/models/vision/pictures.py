"""Pictures on their way into a language model: patches before a tower, states behind it."""

from typing import NamedTuple

import jax

VISUAL = "visual"
"""A tower's weights: the collection of a frozen one, the part of "params" where it is trained, its part of "lora"."""


class Pictures(NamedTuple):
    """Pictures as a tower takes them: [..] rows with up to I pictures each, in the order of their prompts.

    The leading axes are [P] for prompts, [P, G] for what an environment answered to completions. Pictures differ in
    size: S is the largest of the bucket, and what lies behind a picture's own patches is 0.

    Attributes:
        patches: f32 [.., I, S, C], normalised pixel values in the processor's order (merged block after merged block,
            its patches row by row), C = channels · frames · p · p.
        grid: i32 [.., I, 2], rows and columns of patches; (0, 0) where there is no picture.
        windows: i32 [.., I, W, B], the merged tokens of each attention window (-1: none), or None where a tower's
            attention has no windows.
    """

    patches: jax.Array
    grid: jax.Array
    windows: jax.Array | None = None


class PictureStates(NamedTuple):
    """What a tower made of `Pictures`: one state for each placeholder token of a text.

    Attributes:
        states: [.., I, M, D], M = S / merge²; row by row of merged tokens.
        grid: i32 [.., I, 2], rows and columns of merged tokens; (0, 0) where there is no picture.
        deepstack: states [.., I, M, D] that are added after the first decoder layers, one array per layer (Qwen3-VL).
    """

    states: jax.Array
    grid: jax.Array
    deepstack: tuple[jax.Array, ...] = ()
