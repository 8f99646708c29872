"""Objects that a detector finds in pictures, and GenEval's rules for them (Ghosh et al. 2023, arXiv:2310.11513).

The rules are those of its published code; objects are boxes, not outlines.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from bridges.pixels import to_pillow
from grpo_jax.errors import UserError, short_repr

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel

    from bridges.clip import Scorer
    from bridges.scorers.object_detection import ObjectDetection

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
COLOUR_TEXTS = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
RELATIONS = ("left of", "right of", "above", "below")
NAMES = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
"""GenEval's names of objects that COCO's detectors call otherwise."""

Box = np.ndarray
"""Left, top, right and bottom in pixels, f64 [4]."""
Found = Mapping[str, Sequence[Box]]
"""Boxes of a picture's objects by their name, the surest first."""


class Detector:
    """A loaded detector."""

    def __init__(
        self, config: ObjectDetection, model: PreTrainedModel, processor: BaseImageProcessor, device: torch.device
    ):
        self.device = device
        self.names = tuple(model.config.id2label[number] for number in sorted(model.config.id2label))
        self._config = config
        self._model = model
        self._processor = processor

    @property
    def summary(self) -> str:
        """One line for the opening of a run."""
        return f"{self._config.path}: {type(self._model).__name__}, {len(self.names)} kinds, on {self.device}"

    def geneval(
        self, images: torch.Tensor, requests: Sequence[Mapping[str, Any]], scorer: Scorer
    ) -> list[float | None]:
        """Return what pictures [B, 3, H, W] in [0, 1] earn for what is asked; None where nothing is.

        Args:
            images: Float, on any device.
            requests: B lines of GenEval's metadata: `include` and `exclude` are lists of {"class", "count"} and perhaps
                "color" or "position" (["left of", place of another in the list]), `tag` is the kind of prompt.
            scorer: A CLIP, which tells colours.

        Raises:
            UserError: An object or a colour that is not known, or a request of another form.
        """
        asked = [row for row, request in enumerate(requests) if request.get("include") or request.get("exclude")]
        for row in asked:
            _check(requests[row], self.names)
        earned: list[float | None] = [None] * len(requests)
        config = self._config
        for start in range(0, len(asked), config.batch_size):
            rows = asked[start : start + config.batch_size]
            for row, scored in zip(rows, self._detect(images[rows]), strict=True):
                counting = requests[row].get("tag") == "counting"
                threshold = config.counting_threshold if counting else config.threshold
                found = {
                    name: [box for score, box in boxes if score > threshold][: config.most_objects]
                    for name, boxes in scored.items()
                }
                met = requirements_met(
                    found,
                    requests[row],
                    lambda boxes, name, row=row: colours_of(scorer, images[row], boxes, name),
                    config.position_threshold,
                )
                earned[row] = sum(met) / len(met) if config.partial else float(all(met))
        return earned

    def _detect(self, images: torch.Tensor) -> list[dict[str, list[tuple[float, Box]]]]:
        """Return scores and boxes by name, the surest first, of a batch of pictures."""
        size = tuple(images.shape[-2:])
        inputs = self._processor(images=to_pillow(images), return_tensors="pt").to(self.device, self._model.dtype)
        with torch.no_grad():
            outputs = self._model(**inputs)
        lowest = min(self._config.threshold, self._config.counting_threshold)
        read = self._processor.post_process_object_detection(
            outputs, threshold=lowest, target_sizes=[size] * len(images)
        )
        pictures = []
        for one in read:
            found: dict[str, list[tuple[float, Box]]] = {}
            columns = (one[name].float().cpu().numpy() for name in ("scores", "labels", "boxes"))
            for score, label, box in sorted(zip(*columns, strict=True), key=lambda entry: -entry[0]):
                found.setdefault(self.names[int(label)], []).append((float(score), box.astype(np.float64)))
            pictures.append(found)
        return pictures


def colours_of(scorer: Scorer, image: torch.Tensor, boxes: Sequence[Box], name: str) -> list[str]:
    """Return the likeliest colour of what is in each box, by CLIP, zero-shot over three texts of each colour."""
    if not hasattr(scorer, "text_features"):
        raise UserError("a colour is asked for: judges.scorer must compare pictures and texts, as a CLIP does")
    texts = [text.format(colour=colour, name=name) for colour in COLOURS for text in COLOUR_TEXTS]
    means = scorer.text_features(texts).view(len(COLOURS), len(COLOUR_TEXTS), -1).mean(1)
    means = functional.normalize(means, dim=-1)
    named = []
    for box in boxes:
        (left, top), (right, bottom) = np.floor(box[:2]).astype(int).clip(0), np.ceil(box[2:]).astype(int)
        crop = image[None, :, top : max(bottom, top + 1), left : max(right, left + 1)]
        named.append(COLOURS[int((scorer.image_features(crop) @ means.T).argmax(-1))])
    return named


def requirements_met(
    found: Found, request: Mapping[str, Any], colours: Callable[[Sequence[Box], str], list[str]], apart: float
) -> list[bool]:
    """Return whether each part of a request is met: by GenEval's rules all must be.

    Of a kind the surest objects count, as many as are asked for: all of them must have the colour, and all must stand
    as asked to all of the other group. Excluded are as many of a kind as `count`, or more.
    """
    met: list[bool] = []
    groups: list[Sequence[Box] | None] = []
    for wanted in request.get("include") or []:
        count = _count(wanted)
        boxes = found.get(_name(wanted), ())[:count]
        fits = len(boxes) == count
        if fits and wanted.get("color"):
            fits = colours(boxes, wanted["class"]).count(wanted["color"]) == count
        if fits and wanted.get("position"):
            relation, other = wanted["position"]
            others = groups[other]
            fits = others is not None and all(relation in relations(a, b, apart) for a in boxes for b in others)
        met.append(fits)
        groups.append(boxes if fits else None)
    for unwanted in request.get("exclude") or []:
        met.append(len(found.get(_name(unwanted), ())) < _count(unwanted))
    return met


def relations(a: Box, b: Box, apart: float) -> set[str]:
    """Return how object a stands to object b, of `RELATIONS`; two of them where it stands across."""
    centre_a, centre_b = a.reshape(2, 2).mean(0), b.reshape(2, 2).mean(0)
    sizes = np.abs(a[2:] - a[:2]) + np.abs(b[2:] - b[:2])
    offset = centre_a - centre_b
    beyond = np.maximum(np.abs(offset) - apart * sizes, 0) * np.sign(offset)
    if np.all(np.abs(beyond) < 1e-3):
        return set()
    x, y = beyond / np.linalg.norm(offset)
    return {name for name, holds in zip(RELATIONS, (x < -0.5, x > 0.5, y < -0.5, y > 0.5), strict=True) if holds}


def _name(wanted: Mapping[str, Any]) -> str:
    """The detector's name of what is asked for."""
    return NAMES.get(wanted["class"], wanted["class"])


def _count(wanted: Mapping[str, Any]) -> int:
    count = wanted.get("count", 1)
    return count if isinstance(count, int) else 0


def _check(request: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise UserError for a request of another form, and for names that the detector has not."""
    for part in ("include", "exclude"):
        for place, one in enumerate(request.get(part) or []):
            if not (isinstance(one, Mapping) and isinstance(one.get("class"), str) and _count(one) > 0):
                raise UserError(f'{part}: expected {{"class": name, "count": number}}, got {short_repr(one)}')
            name = _name(one)
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0)
                raise UserError(f"{part}: the detector knows no {short_repr(name)}; did you mean {close[0]!r}?")
            if (colour := one.get("color")) and colour not in COLOURS:
                raise UserError(f"{part}: expected a colour, {', '.join(COLOURS)}, got {short_repr(colour)}")
            if (position := one.get("position")) and (
                len(position) != 2 or position[0] not in RELATIONS or position[1] not in range(place)
            ):
                expected = f"[{' | '.join(RELATIONS)}, the place of one before it]"
                raise UserError(f"{part}: expected a position {expected}, got {short_repr(position)}")
