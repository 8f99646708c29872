"""What a vision tower is: shape and choices, as `families.vision_fields` reads them from a folder."""

import dataclasses
import math

import jax

from grpo_jax.errors import shown
from grpo_jax.models.layers import ACTIVATIONS as TEXT_ACTIVATIONS

ACTIVATIONS = {**TEXT_ACTIVATIONS, "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x)}


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Shape and choices of a vision tower; hashable, hence static under jit.

    Attributes:
        family: Hugging Face's name of the architecture, tower and language model together.
        depth: number of layers.
        width: of the layers' states.
        inner: of their MLP.
        heads: of their attention; a head's size is a multiple of 4.
        out: D, width of the language model.
        patch: pixels along a patch's side.
        image_token: the placeholder that a merged token's state takes the place of.
        video_token: the same for videos, which are not supported: it must not occur in a text.
        vision_start_token: ordinary token before a picture.
        vision_end_token: ordinary token behind a picture.
        activation: of the layers' MLP, one of `ACTIVATIONS`.
        frames: a patch holds as many, all alike for a still picture.
        channels: of a pixel.
        merge: patches along the side of a merged token.
        window: merged tokens along the side of an attention window; None where all layers see the whole picture.
        full_attention_layers: those that do where there are windows.
        deepstack_layers: those whose states are also added after the first layers of the language model, ascending.
        positions: rows of the table of learned positions, of which the largest square is used; 0 for none.
        theta: base of the rotations' wavelengths.
        epsilon: of every norm.
        initializer_range: standard deviation of freshly drawn weights.
    """

    family: str
    depth: int
    width: int
    inner: int
    heads: int
    out: int
    patch: int
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int
    activation: str = "quick_gelu"
    frames: int = 2
    channels: int = 3
    merge: int = 2
    window: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    deepstack_layers: tuple[int, ...] = ()
    positions: int = 0
    theta: float = 10_000.0
    epsilon: float = 1e-6
    initializer_range: float = 0.02

    def __post_init__(self):
        """Refuse shapes that cannot be, by the names of the fields in a ``config.json``."""
        if self.width % self.heads or self.head_dim % 4:
            raise ValueError(
                "vision_config: the width must be a multiple of num_heads and a head's size a multiple of 4, "
                f"got {self.width} and {self.heads}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"vision_config.hidden_act must be one of {tuple(ACTIVATIONS)}, got {shown(self.activation)}"
            )
        chosen = {
            "fullatt_block_indexes": self.full_attention_layers,
            "deepstack_visual_indexes": self.deepstack_layers,
        }
        for name, layers in chosen.items():
            if list(layers) != sorted(set(layers) & set(range(self.depth))):
                raise ValueError(
                    f"vision_config.{name} must be ascending numbers of {self.depth} layers, got {shown(layers)}"
                )

    @property
    def head_dim(self) -> int:
        """E, size of a head."""
        return self.width // self.heads

    @property
    def pixels(self) -> int:
        """C, numbers of one patch."""
        return self.channels * self.frames * self.patch**2

    @property
    def merged(self) -> int:
        """Patches of one merged token."""
        return self.merge**2

    @property
    def side(self) -> int:
        """Positions along a side of the square that the table holds."""
        return math.isqrt(self.positions)
