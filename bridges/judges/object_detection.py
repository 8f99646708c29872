"""Object detectors of transformers for GenEval's rules (Ghosh et al. 2023, arXiv:2310.11513).

The rules are those of its published code; objects are boxes, not masks.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bridges.judges import ModelJudge
from grpo_jax.config.fields import PositiveCount, Share, require, resume_mutable
from grpo_jax.errors import UserError, short_repr

if TYPE_CHECKING:
    import torch
    from transformers import BaseImageProcessor, PreTrainedModel

    from bridges.clip import Scorer

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
COLOUR_TEXTS = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
RELATIONS = ("left of", "right of", "above", "below")
NAMES = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
"""GenEval's names of objects that have other names in COCO's detectors."""
LABELS = {"aeroplane": "airplane", "diningtable": "dining table", "motorbike": "motorcycle", "sofa": "couch"}
LABELS |= {"pottedplant": "potted plant", "tvmonitor": "tv"}
"""COCO's names of labels that RT-DETR takes from Pascal VOC."""

# GenEval's own numbers: score of an object to count, gap of neighbours as a share of their sizes, objects of a kind
COUNTING_THRESHOLD, POSITION_THRESHOLD, MOST_OBJECTS = 0.9, 0.1, 16

Box = Sequence[float]  # left, top, right and bottom in pixels


class ObjectDetection(ModelJudge):
    """Score a picture by a detector's objects: their kinds, numbers, places and colours."""

    auto = "AutoModelForObjectDetection"
    working_bytes = 2**30

    path: str
    """Folder or hub id of an object-detection model of transformers."""
    threshold: Share = 0.3
    """Score that an object must exceed; 0.9 if the prompt's tag is "counting"."""
    partial: bool = False
    """Score the share of the requirements that are met, rather than 1 if all are met, else 0."""
    batch_size: PositiveCount = resume_mutable(8)
    """Pictures per batch."""

    def load(self, device: str) -> Detector:
        """Load the detector on "cpu" or "gpu:N"; UserError without one, or without safetensors of all weights."""
        from transformers import AutoImageProcessor, AutoModelForObjectDetection

        from bridges.loading import load_complete, load_part

        processor = load_part(AutoImageProcessor, self.path, "image processor")
        detects = hasattr(processor, "post_process_object_detection")
        require(detects, self.path, "a model that detects objects", f"a {type(processor).__name__}")
        model = load_complete(AutoModelForObjectDetection, self.path, dtype=self.dtype, device=device)
        return Detector(self, model, processor)


@dataclass(eq=False, repr=False)
class Detector:
    """A loaded detector."""

    _config: ObjectDetection
    _model: PreTrainedModel
    _processor: BaseImageProcessor

    def __post_init__(self) -> None:
        self.device, labels = self._model.device, self._model.config.id2label
        self.names = tuple(LABELS.get(labels[number], labels[number]) for number in sorted(labels))

    def __str__(self) -> str:
        return f"{self._config.path}: {type(self._model).__name__}, {len(self.names)} kinds, on {self.device}"

    def geneval(
        self, images: torch.Tensor, requests: Sequence[Mapping[str, Any]], scorer: Scorer
    ) -> list[float | None]:
        """Return the scores of pictures [B, 3, H, W] in [0, 1] for the requested objects; None without a request.

        Args:
            images: Float, on any device.
            requests: B lines of GenEval's metadata: `include` and `exclude` are lists of {"class", "count"} and perhaps
                "color" or "position" (["left of", place of another in the list]), `tag` is the kind of prompt.
                UserError for an unknown object or colour, or another form.
            scorer: A CLIP, which classifies colours.
        """
        asked = [row for row, request in enumerate(requests) if request.get("include") or request.get("exclude")]
        for row in asked:
            _check(requests[row], self.names)
        earned: list[float | None] = [None] * len(requests)
        config = self._config
        for start in range(0, len(asked), config.batch_size):
            rows = asked[start : start + config.batch_size]
            for row, seen in zip(rows, self._detect(images[rows]), strict=True):
                counting = requests[row].get("tag") == "counting"
                least = COUNTING_THRESHOLD if counting else config.threshold
                found = {n: [box for score, box in boxes[:MOST_OBJECTS] if score > least] for n, boxes in seen.items()}
                met = requirements_met(found, requests[row], partial(colours_of, scorer, images[row]))
                earned[row] = sum(met) / len(met) if config.partial else float(all(met))
        return earned

    def _detect(self, images: torch.Tensor) -> list[dict[str, list[tuple[float, Box]]]]:
        """Return scores and boxes by name, by descending score, for a batch of pictures."""
        import torch

        from bridges.pixels import to_pillow

        inputs = self._processor(images=to_pillow(images), return_tensors="pt").to(self.device, self._model.dtype)
        with torch.no_grad():
            outputs = self._model(**inputs)
        least = min(self._config.threshold, COUNTING_THRESHOLD)
        sizes = [tuple(images.shape[-2:])] * len(images)
        read = self._processor.post_process_object_detection(outputs, threshold=least, target_sizes=sizes)
        pictures = []
        for one in read:
            found: dict[str, list[tuple[float, Box]]] = {}
            columns = (one[name].float().tolist() for name in ("scores", "labels", "boxes"))
            for score, label, box in sorted(zip(*columns, strict=True), key=lambda entry: -entry[0]):
                found.setdefault(self.names[int(label)], []).append((score, box))
            pictures.append(found)
        return pictures


def colours_of(scorer: Scorer, image: torch.Tensor, boxes: Sequence[Box], name: str) -> list[str]:
    """Return the likeliest colour in each box by zero-shot CLIP, with three texts per colour."""
    from torch.nn.functional import normalize

    if not hasattr(scorer, "text_features"):
        raise UserError("a colour is asked for: judges.scorer must compare pictures and texts, as a CLIP does")
    texts = [text.format(colour=colour, name=name) for colour in COLOURS for text in COLOUR_TEXTS]
    means = normalize(scorer.text_features(texts).view(len(COLOURS), len(COLOUR_TEXTS), -1).mean(1), dim=-1)
    named = []
    for box in boxes:
        left, top = (max(math.floor(value), 0) for value in box[:2])
        right, bottom = (math.ceil(value) for value in box[2:])
        crop = image[None, :, top : max(bottom, top + 1), left : max(right, left + 1)]
        named.append(COLOURS[int((scorer.image_features(crop) @ means.T).argmax(-1))])
    return named


def requirements_met(
    found: Mapping[str, Sequence[Box]], request: Mapping[str, Any], colours: Callable[[Sequence[Box], str], list[str]]
) -> list[bool]:
    """Return whether each part of a request is met; GenEval's rules require all.

    `found` are a picture's boxes by name, by descending score. Of each class, the requested number of best objects
    counts. All of them must have the colour, and the requested position to all objects of the other group. An exclusion
    fails at `count` or more objects of its class.
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
            fits = others is not None and all(relation in relations(a, b) for a in boxes for b in others)
        met.append(fits)
        groups.append(boxes if fits else None)
    for unwanted in request.get("exclude") or []:
        met.append(len(found.get(_name(unwanted), ())) < _count(unwanted))
    return met


def relations(a: Box, b: Box) -> set[str]:
    """Return the `RELATIONS` of object a to object b; two for a diagonal position."""
    offset = [(a[axis] + a[axis + 2] - b[axis] - b[axis + 2]) / 2 for axis in (0, 1)]
    sizes = [abs(a[axis + 2] - a[axis]) + abs(b[axis + 2] - b[axis]) for axis in (0, 1)]
    gaps = [max(abs(o) - POSITION_THRESHOLD * size, 0.0) for o, size in zip(offset, sizes, strict=True)]
    if max(gaps) < 1e-3:
        return set()
    x, y = (math.copysign(gap, o) / math.hypot(*offset) for gap, o in zip(gaps, offset, strict=True))
    return {name for name, holds in zip(RELATIONS, (x < -0.5, x > 0.5, y < -0.5, y > 0.5), strict=True) if holds}


def _name(wanted: Mapping[str, Any]) -> str:
    """Return the detector's name of a requested object."""
    return NAMES.get(wanted["class"], wanted["class"])


def _count(wanted: Mapping[str, Any]) -> int:
    count = wanted.get("count", 1)
    return count if isinstance(count, int) else 0


def _check(request: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise UserError for a request of another form, and for names unknown to the detector."""
    for part in ("include", "exclude"):
        for place, one in enumerate(request.get(part) or []):
            fits = isinstance(one, Mapping) and isinstance(one.get("class"), str) and _count(one) > 0
            require(fits, part, '{"class": name, "count": number}', one)
            if (name := _name(one)) not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0)
                raise UserError(f"{part}: the detector knows no {short_repr(name)}; did you mean {close[0]!r}?")
            colour, position = one.get("color"), one.get("position")
            require(not colour or colour in COLOURS, part, f"a colour, {', '.join(COLOURS)}", colour)
            placed = not position or (len(position) == 2 and position[0] in RELATIONS and position[1] in range(place))
            require(placed, part, f"a position [{' | '.join(RELATIONS)}, the place of one before it]", position)
