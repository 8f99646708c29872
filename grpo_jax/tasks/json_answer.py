"""Answers as a JSON object: a prompt, and what the answer sets of the renderer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_jax.core.form import json_moves
from grpo_jax.rollout.texts import Reading


@dataclass(frozen=True)
class JsonAnswer:
    """The fields of an answer: "prompt", then those of the renderer that are asked for, in this order.

    Attributes:
        negative_prompt: Whether there is one.
        guidance: The least and the most, in halves; empty without.
        steps: The least and the most; empty without.
    """

    negative_prompt: bool = False
    guidance: Sequence[float] = ()
    steps: Sequence[int] = ()

    @property
    def names(self) -> list[str]:
        """The renderer's fields."""
        return [name for name in ("negative_prompt", "guidance", "steps") if getattr(self, name)]

    def moves(self) -> np.ndarray:
        """The automaton over an answer's bytes, as of `core.form.json_moves`."""
        halves = range(int(np.ceil(2 * self.guidance[0])), int(2 * self.guidance[1]) + 1) if self.guidance else ()
        whole = range(self.steps[0], self.steps[1] + 1) if self.steps else ()
        texts = {"guidance": [f"{half / 2:.1f}" for half in halves], "steps": [str(number) for number in whole]}
        return json_moves([("prompt", None), *((name, texts.get(name)) for name in self.names)])

    def read(self, written: str, prompt: str) -> Reading:
        """Read an answer; the user's `prompt`, not usable, unless all of it is there and within its bounds."""
        try:
            fields = dict(json.loads(written, object_pairs_hook=_all_of))
        except (ValueError, TypeError, RecursionError):  # no JSON, no object, or a name twice
            return Reading(prompt, False)
        if list(fields) != ["prompt", *self.names] or not all(self._fits(*field) for field in fields.items()):
            return Reading(prompt, False)
        return Reading(fields.pop("prompt").strip(), True, fields)

    def _fits(self, name: str, value: object) -> bool:
        if name == "prompt":
            return isinstance(value, str) and any(map(str.isalnum, value))
        if name == "negative_prompt":
            return isinstance(value, str)
        low, high = getattr(self, name)
        kinds = (int,) if name == "steps" else (int, float)
        return type(value) in kinds and low <= value <= high


def _all_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)
