"""Objects in pictures by a detector, judged by GenEval's rules (Ghosh et al. 2023, arXiv:2310.11513)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from grpo_jax.config.fields import PositiveCount, check_ranges, may_change, require
from grpo_jax.errors import UserError, short_repr

if TYPE_CHECKING:
    import torch
    from transformers import BaseImageProcessor, PreTrainedModel

    from bridges.clip import Scorer

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
COLOUR_TEXTS = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
NAMES = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
"""GenEval's names of objects that COCO's detectors call otherwise."""
RELATIONS = ("left of", "right of", "above", "below")

Box = np.ndarray
"""Left, top, right and bottom in pixels, f64 [4]."""
Found = Mapping[str, Sequence[Box]]
"""Boxes of a picture's objects by their name, the surest first."""


@dataclass(frozen=True)
class ObjectDetection:
    """Judges a picture by the objects that a detector finds: what is there, how many, where, and of which colour.

    Args:
        path: Folder or hub id of an object-detection model of transformers.
        colours: Folder or hub id of a `CLIPModel` of transformers that names the colour of an object; empty where no
            prompt asks for colours.
        threshold: Score that an object must exceed.
        counting_threshold: The same of prompts whose tag is "counting".
        position_threshold: Share of two objects' sizes by which they must lie apart to stand beside each other.
        most_objects: Objects of a kind, at most.
        partial: Earn the share of what is asked for that is there, in place of 1 where all is and else 0.
        dtype: Type of the weights.
        batch_size: Pictures looked at at once.
    """

    path: str = ""
    colours: str = ""
    threshold: float = 0.3
    counting_threshold: float = 0.9
    position_threshold: float = 0.1
    most_objects: PositiveCount = 16
    partial: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_size: PositiveCount = may_change(8)

    def __post_init__(self) -> None:
        require(bool(self.path), "path", "a folder or hub id", self.path)
        for name in ("threshold", "counting_threshold", "position_threshold"):
            require(0 <= getattr(self, name) < 1, name, "a number in [0, 1)", getattr(self, name))
        check_ranges(self, "")

    def check(self) -> None:
        """Refuse folders that are not there; no weight is read."""
        from bridges.loading import load_config, local_folder
        from bridges.scorers.clip_model import ClipModel

        if local_folder(self.path) is not None:
            load_config(self.path)
        if self.colours:
            ClipModel(self.colours).check()

    def load(self, device: str) -> Detector:
        """Load the detector, and what tells colours, on "cpu" or "gpu:N".

        Raises:
            UserError: No such model, none that detects objects, or weights that are missing, broken, or no safetensors.
        """
        from transformers import AutoImageProcessor, AutoModelForObjectDetection

        from bridges.loading import load_complete, load_part, torch_device
        from bridges.scorers.clip_model import ClipModel

        target = torch_device(device)
        processor = load_part(AutoImageProcessor, self.path, "image processor")
        if not hasattr(processor, "post_process_object_detection"):
            raise UserError(f"{self.path}: expected a model that detects objects, its image processor reads no boxes")
        model = load_complete(AutoModelForObjectDetection, self.path, dtype=self.dtype).to(target)
        colours = ClipModel(self.colours, dtype=self.dtype).load(device) if self.colours else None
        return Detector(self, model, processor, colours, target)

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights, and an allowance of a gigabyte for a batch."""
        from bridges import loading
        from bridges.scorers.clip_model import ClipModel

        weights = loading.model_size(self.path, "AutoModelForObjectDetection") * loading.ITEM_BYTES[self.dtype]
        colours = ClipModel(self.colours, dtype=self.dtype).memory() if self.colours else []
        return [("detector", weights, self.dtype), ("looking", 2**30, "allowance"), *colours]


class Detector:
    """A loaded detector."""

    def __init__(
        self,
        config: ObjectDetection,
        model: PreTrainedModel,
        processor: BaseImageProcessor,
        colours: Scorer | None,
        device: torch.device,
    ):
        """Take the parts as `ObjectDetection.load` makes them."""
        self.device = device
        self.names = tuple(model.config.id2label[number] for number in sorted(model.config.id2label))
        self._config = config
        self._model = model
        self._processor = processor
        self._colours = colours

    @property
    def summary(self) -> str:
        """One line for the opening of a run."""
        return f"{self._config.path}: {type(self._model).__name__}, {len(self.names)} kinds, on {self.device}"

    def geneval(self, images: torch.Tensor, requests: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Return what pictures [B, 3, H, W] in [0, 1] earn for what is asked; None where nothing is.

        A request is a line of GenEval's metadata: `include` and `exclude` are lists of {"class", "count"} and perhaps
        "color" or "position" (["left of", place of another in the list]), `tag` is the kind of prompt.

        Raises:
            UserError: An object or a colour that is not known, or a request of another form.
        """
        asked = [row for row, request in enumerate(requests) if request.get("include") or request.get("exclude")]
        for row in asked:
            self._check(requests[row])
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
                    lambda boxes, name, row=row: self._colours_of(images[row], boxes, name),
                    config.position_threshold,
                )
                earned[row] = sum(met) / len(met) if config.partial else float(all(met))
        return earned

    def _detect(self, images: torch.Tensor) -> list[dict[str, list[tuple[float, Box]]]]:
        """Return scores and boxes by name, the surest first, of a batch of pictures."""
        import torch

        from bridges.pixels import to_pillow

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

    def _colours_of(self, image: torch.Tensor, boxes: Sequence[Box], name: str) -> list[str]:
        """Return the likeliest colour of what is in each box, by CLIP, zero-shot over three texts of each colour."""
        import torch

        assert self._colours is not None
        texts = [text.format(colour=colour, name=name) for colour in COLOURS for text in COLOUR_TEXTS]
        means = self._colours.text_features(texts).view(len(COLOURS), len(COLOUR_TEXTS), -1).mean(1)
        means = torch.nn.functional.normalize(means, dim=-1)
        named = []
        for box in boxes:
            (left, top), (right, bottom) = np.floor(box[:2]).astype(int).clip(0), np.ceil(box[2:]).astype(int)
            crop = image[None, :, top : max(bottom, top + 1), left : max(right, left + 1)]
            likest = (self._colours.image_features(crop) @ means.T).argmax(-1)
            named.append(COLOURS[int(likest)])
        return named

    def _check(self, request: Mapping[str, Any]) -> None:
        for part in ("include", "exclude"):
            wanted = request.get(part) or []
            for place, one in enumerate(wanted):
                if not (isinstance(one, Mapping) and isinstance(one.get("class"), str) and _count(one) > 0):
                    raise UserError(f'{part}: expected {{"class": name, "count": number}}, got {short_repr(one)}')
                name = NAMES.get(one["class"], one["class"])
                if name not in self.names:
                    close = difflib.get_close_matches(name, self.names, n=1, cutoff=0)
                    raise UserError(f"{part}: the detector knows no {short_repr(name)}; did you mean {close[0]!r}?")
                if (colour := one.get("color")) and (colour not in COLOURS or self._colours is None):
                    mend = (
                        f"one of {', '.join(COLOURS)}" if self._colours else "judges.NAME.colours to name a CLIPModel"
                    )
                    raise UserError(f"{part}: a colour is asked for, {short_repr(colour)}; expected {mend}")
                if position := one.get("position"):
                    relation, other = position
                    if relation not in RELATIONS or other not in range(place):
                        expected = f"[{' | '.join(RELATIONS)}, the place of one before it]"
                        raise UserError(f"{part}: expected a position {expected}, got {short_repr(position)}")


def _count(wanted: Mapping[str, Any]) -> int:
    count = wanted.get("count", 1)
    return count if isinstance(count, int) else 0


def requirements_met(
    found: Found, request: Mapping[str, Any], colours_of: Callable[[Sequence[Box], str], list[str]], apart: float
) -> list[bool]:
    """Return whether each part of a request is met: by GenEval's rules all must be.

    Of a kind the surest objects count, as many as are asked for: all of them must have the colour, and all must stand
    as asked to all of the other group. Excluded are as many of a kind as `count`, or more.
    """
    met: list[bool] = []
    groups: list[Sequence[Box] | None] = []
    for wanted in request.get("include") or []:
        name, count = NAMES.get(wanted["class"], wanted["class"]), _count(wanted)
        boxes = found.get(name, ())[:count]
        fits = len(boxes) == count
        if fits and wanted.get("color"):
            fits = colours_of(boxes, wanted["class"]).count(wanted["color"]) == count
        if fits and wanted.get("position"):
            relation, other = wanted["position"]
            others = groups[other]
            fits = others is not None and all(relation in relations(a, b, apart) for a in boxes for b in others)
        met.append(fits)
        groups.append(boxes if fits else None)
    for unwanted in request.get("exclude") or []:
        name = NAMES.get(unwanted["class"], unwanted["class"])
        met.append(len(found.get(name, ())) < _count(unwanted))
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
    true = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in true.items() if holds}
