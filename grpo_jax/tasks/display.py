"""A task's display of a run: on the terminal, in the curves of report.html, in its tables and pictures."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BeforeValidator


def encode_png(image: np.ndarray) -> bytes:
    """Return the PNG bytes of a picture, uint8 [H, W, 3]."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, format="PNG")
    return buffer.getvalue()


def decode_picture(value: object) -> object:
    """Return the picture of a PNG in base64; anything but text as it is. ValueError where it is none."""
    if not isinstance(value, str):
        return value
    from PIL import Image

    try:
        file = io.BytesIO(base64.b64decode(value, validate=True))
        return np.asarray(Image.open(file, formats=["PNG"]).convert("RGB"))
    except Exception as error:  # Pillow raises many kinds, for a picture that is too large too
        raise ValueError("expected a PNG in base64") from error


Picture = Annotated[np.ndarray, BeforeValidator(decode_picture)]
"""A picture, uint8 [H, W, 3]; files hold it as PNG in base64."""


class Curve(NamedTuple):
    """A metric, by its key in metrics.jsonl, over the iterations, with its label in the legend.

    A sparse one is measured now and then rather than at each iteration, and is drawn with dots.
    """

    metric: str
    label: str
    sparse: bool = False


class Chart(NamedTuple):
    """Curves under one title; a chart without a point is left out."""

    title: str
    curves: tuple[Curve, ...]
    note: str = ""


class Display(NamedTuple):
    """How a task's measures are shown.

    Attributes:
        headline: Measures that lead the report, the first that there is.
        live: (metric, label) on the terminal while a run goes on, beside those of all tasks.
        charts: Before all others, which leave their metrics out.
        hidden: Measures that no chart shows.
        digits: Digits behind the point by measure, without its "@…"; 3 for others.
        best: The claim's name for the oracle's value.
    """

    headline: tuple[str, ...] = ()
    live: tuple[tuple[str, str], ...] = ()
    charts: tuple[Chart, ...] = ()
    hidden: tuple[str, ...] = ()
    digits: Mapping[str, int] = {}
    best: str = "the best possible"

    def digits_of(self, measure: str) -> int:
        """Return the digits behind the point of a measure."""
        return self.digits.get(measure.partition("@")[0], 3)


class Table(NamedTuple):
    """Rows under column names; the note stands above."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


class GalleryEntry(NamedTuple):
    """One prompt before and after training; pictures are uint8 [H, W, 3] or None. `shown` are the prompt's own."""

    prompt: str
    rewrite: str
    before: Picture | None = None
    after: Picture | None = None
    scores: Mapping[str, tuple[float | None, float | None]] = {}  # name → (before, after)
    seed: int | None = None  # of the noise that both pictures were drawn from
    shown: Sequence[Picture] = ()


class ShownTurn(NamedTuple):
    """A turn of an episode that is shown, with the policy's judged text.

    Attributes:
        scores: Rewards and watched measures by name, NaN where missing.
        image: The picture drawn of it, uint8 [H, W, 3], or None.
        observation: The environment's; None where the episode ended.
        pictures: What the policy saw of the observation, uint8 [H, W, 3].
    """

    text: str
    scores: Mapping[str, float | None] = {}
    image: Picture | None = None
    observation: str | None = None
    pictures: Sequence[Picture] = ()


class EpisodeEntry(NamedTuple):
    """An episode as it went, behind its prompt and the pictures of that, uint8 [H, W, 3]; with a title or without."""

    prompt: str
    turns: Sequence[ShownTurn]
    pictures: Sequence[Picture] = ()
    title: str = ""


class Findings(NamedTuple):
    """A task's results of the held-out measurements, beside the means that every run reports.

    Attributes:
        tables: For report.html.
        lines: For the terminal.
        records: Further entries of summary.json by name, such as "table"; empty ones are left out.
    """

    tables: Sequence[Table] = ()
    lines: Sequence[str] = ()
    records: Mapping[str, Sequence[Mapping[str, Any]]] = {}

    @property
    def entries(self) -> dict[str, list[Mapping[str, Any]]]:
        """The records that are not empty."""
        return {name: list(records) for name, records in self.records.items() if records}


_TURN_MEASURE = re.compile(r"(.+)_(turn_\d+|peak|kept|gain)")


def of_turns(name: str, names: Collection[str]) -> bool:
    """Return whether a measure is one of another's turns, of these names.

    Runs of several turns measure NAME_turn_1 of every NAME; without it NAME_gain is another reward's name.
    """
    match = _TURN_MEASURE.fullmatch(name)
    return match is not None and match[1] in names and f"{match[1]}_turn_1" in names
