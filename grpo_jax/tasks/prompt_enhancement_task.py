"""The task: rewrite what people type so that a diffusion model draws what they asked for."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.data import PromptSet
from grpo_jax.rollout.prompts import load_prompts
from grpo_jax.rollout.texts import Reading
from grpo_jax.tasks.json_answer import JsonAnswer
from grpo_jax.tasks.pictures import (
    MINIATURE,
    REWARDS,
    SCENES,
    PictureTask,
    miniature_prompts,
    picture_data,
    picture_prompts,
    scene_prompts,
    takes_pictures,
    with_sources,
)
from grpo_jax.tasks.task import TaskData, TaskReport, TaskSetup, oracle_column

COMPOSITIONAL = "compositional"
"""Value of data.prompts: objects, counts, colours and places, with questions for a judge that sees."""
BOTH = "builtin+compositional"
"""Value of data.prompts: those that ship with the package, and as many compositional ones, in turn."""
DEFAULT_REWARDS = (RewardSection("alignment"), RewardSection("faithfulness", 0.5), RewardSection("length", 0.2))


@dataclass(frozen=True)
class PromptEnhancement(PictureTask):
    """Rewrites prompts for a text-to-image model: judges.renderer draws them, judges.scorer compares them.

    Args:
        answer: What is written: "text" of which the prompt is read, or a "json" object of it and the fields below,
            which nothing but its form can be sampled of.
        negative_prompt: Whether a JSON answer has a negative prompt.
        guidance: Least and most guidance that a JSON answer sets, in halves; empty for the renderer's own.
        steps: Least and most denoising steps that a JSON answer sets; empty for the renderer's own.
        see_source: Whether the policy sees the picture that judges.renderer draws from.
    """

    default_config: ClassVar[str | None] = "prompt_enhancement_miniature"

    answer: Literal["text", "json"] = "text"
    negative_prompt: bool = False
    guidance: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    see_source: bool = False

    draws_from_pictures: ClassVar[bool] = True

    @property
    def _json(self) -> JsonAnswer:
        return JsonAnswer(self.negative_prompt, self.guidance, self.steps)

    @property
    def answer_moves(self) -> np.ndarray | None:
        """The automaton of JSON answers."""
        return self._json.moves() if self.answer == "json" else None

    def check(self, config: Config) -> None:
        """Refuse settings that no picture task has, and fields that the answer or the renderer cannot have."""
        super().check(config)
        for name, most in (("guidance", 100), ("steps", 1000)):
            bounds = getattr(self, name)
            sound = not bounds or (len(bounds) == 2 and 1 <= bounds[0] <= bounds[1] <= most)
            require(sound, f"task.{name}", f"[least, most] from 1 to {most}", bounds)
        between = not self.guidance or np.ceil(2 * self.guidance[0]) <= 2 * self.guidance[1]
        require(bool(between), "task.guidance", "bounds with a half between them", self.guidance)
        drawn_from = not self.see_source or takes_pictures(config)
        require(drawn_from, "task.see_source", "false with a renderer that draws from texts alone", self.see_source)
        asked = self._json.names
        if self.answer == "text":
            require(not asked, "task.answer", f'"json", to set {" and ".join(asked)}', "text")
            return
        require(config.data.form == "rewrite", "data.form", '"rewrite" with task.answer "json"', config.data.form)
        renderer = config.judges["renderer"]
        for name in asked:
            kind = type(getattr(renderer, "judge", renderer)).__name__
            without = f"none: judges.renderer, a {kind}, has no such field"
            require(hasattr(renderer, name), f"task.{name}", without, getattr(self, name))

    def reader(self, config: Config) -> Callable[[str, str], Reading]:
        """Return the parser of completions."""
        return self._json.read if self.answer == "json" else super().reader(config)

    def remark(self, completions: Sequence[str]) -> str:
        """Return a note on negative prompts that are left out, which those of JSON answers are not."""
        return "" if self.answer == "json" else super().remark(completions)

    def count_pictures(self, config: Config) -> tuple[int, int]:
        """Count the picture that is drawn from, if the policy sees it."""
        return int(self.see_source), 0

    def load(self, setup: TaskSetup) -> TaskData:
        """Load the prompts and the renderer."""
        config = setup.config
        self._check_renderer(config.judges["renderer"])
        prompts = setup.prompts or _prompts(config)
        if takes_pictures(config):
            prompts = PromptSet(*(with_sources(part, seen=self.see_source) for part in prompts))
        return replace(
            picture_data(config, prompts, REWARDS, DEFAULT_REWARDS),
            report=TaskReport(lambda rows: {"unchanged": [row.prompt for row in rows], **oracle_column(rows)}),
        )

    def _check_renderer(self, section: Any) -> None:
        """Let the renderer refuse what answers may set, as if its own section did."""
        guidance = dict.fromkeys(("guidance", "eval_guidance"), max(self.guidance)) if self.guidance else {}
        negative = {"negative_prompt": "blurry"} if self.negative_prompt else {}
        judge = getattr(section, "judge", section)  # of a pool
        changed = {name: value for name, value in (guidance | negative).items() if hasattr(judge, name)}
        if changed and hasattr(section, "check"):
            asked = replace(judge, **changed)
            (asked if judge is section else replace(section, judge=asked)).check()


def _prompts(config: Config) -> PromptSet:
    makers = {MINIATURE: miniature_prompts, SCENES: scene_prompts, COMPOSITIONAL: compositional_records}
    makers[BOTH] = partial(_both_records, config.data.held_out)
    return picture_prompts(config, makers, "a .jsonl or .txt file, or builtin")


def _both_records(held_out: float, split: str, count: int) -> list[dict[str, Any]]:
    """Return built-in and compositional prompts in turn: of however many are measured, half are of each list."""
    rows = getattr(load_prompts("builtin", held_out=held_out), split)
    plain = [{"prompt": row.prompt, **row.columns} for row in rows]
    return [record for pair in zip(plain, compositional_records(split, len(rows)), strict=True) for record in pair]


# Prompts that a picture can get wrong one part at a time: objects, counts, colours, places and what belongs to what, in
# the manner of GenEval (Ghosh et al. 2023, arXiv:2310.11513), with yes-or-no questions for a judge that sees in place
# of an object detector (`questions@NAME`, docs/judges.md). Each prompt is made of combinations, and one that is held
# out is asked for in no other split: a pair of objects (together or in their places), a number of an object, a colour
# of an object (alone or bound beside another, where the pair may be one that is known).

_PLURALS_IN_S = (
    "apple backpack banana bear bed bicycle bird book bottle bowl cake car cat chair clock cow cup dog donut elephant "
    "fork giraffe guitar hat horse kite lamp laptop motorcycle orange pizza suitcase teapot train umbrella vase"
)
OBJECTS = {name: f"{name}s" for name in _PLURALS_IN_S.split()} | {
    "bench": "benches",
    "bus": "buses",
    "couch": "couches",
    "knife": "knives",
    "sheep": "sheep",
    "watch": "watches",
}
"""Objects, and their plurals."""
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
NUMBERS = {2: "two", 3: "three", 4: "four"}
PLACES = ("to the left of", "to the right of", "above", "below")
KINDS = ("object", "objects", "count", "colour", "place", "binding")


class Wish(NamedTuple):
    """A prompt, the questions about its picture, and the combinations that it is made of."""

    kind: str
    prompt: str
    questions: tuple[str, ...]
    combinations: tuple[tuple[str, ...], ...]


def compositional_records(split: str, count: int) -> list[dict[str, Any]]:
    """Return records with `prompt`, `questions` (a list of texts) and `kind`, of all kinds in turn, always the same.

    "train", "validation" and "test" have eight, one and one of ten combinations. Objects alone, which are no
    combination, are in "train" only. Fewer than `count` where there are no more; ValueError for another split.
    """
    if split not in ("train", "validation", "test"):
        raise ValueError(f'split: expected "train", "validation" or "test", got {split!r}')
    of_split = sorted((wish for wish in wishes() if split_of(wish) == split), key=_place)
    turns = itertools.zip_longest(*([wish for wish in of_split if wish.kind == kind] for kind in KINDS))
    chosen = itertools.islice((wish for turn in turns for wish in turn if wish is not None), count)
    return [{"prompt": wish.prompt, "questions": list(wish.questions), "kind": wish.kind} for wish in chosen]


def split_of(wish: Wish) -> str | None:
    """Return the split of all combinations of a prompt; None if they differ, and it is not used."""
    places = {_split(combination) for combination in wish.combinations}
    return "train" if not places else places.pop() if len(places) == 1 else None


def wishes() -> Iterator[Wish]:
    """Yield all prompts."""
    for name in OBJECTS:
        yield Wish("object", _a(name), (_there(name),), ())
    for name, (number, word) in itertools.product(OBJECTS, NUMBERS.items()):
        prompt = f"{word} {OBJECTS[name]}"
        yield Wish("count", prompt, (f"Are there exactly {prompt} in the picture?",), ((str(number), name),))
    for name, colour in itertools.product(OBJECTS, COLOURS):
        if name != colour:  # an orange orange
            question = _there(name), f"Is the {name} {colour}?"
            yield Wish("colour", _a(f"{colour} {name}"), question, ((colour, name),))
    for first, second in itertools.combinations(OBJECTS, 2):
        both, pair = (_there(first), _there(second)), ((first, second),)
        yield Wish("objects", f"{_a(first)} and {_a(second)}", both, pair)
        place = PLACES[_number(first, second) % len(PLACES)]
        yield Wish("place", f"{_a(first)} {place} {_a(second)}", (*both, f"Is the {first} {place} the {second}?"), pair)
        yield from _bindings(first, second)


def _bindings(first: str, second: str) -> Iterator[Wish]:
    """Yield two objects of two colours, for a few of the pairs of colours."""
    number = _number(second, first)
    for step in range(4):
        one, other = COLOURS[(number + 3 * step) % 10], COLOURS[(number // 10 + 7 * step) % 10]
        if one != other and first != one and second != other:
            named = f"{one} {first}", f"{other} {second}"
            combinations = (one, first), (other, second)
            yield Wish("binding", " and ".join(map(_a, named)), tuple(map(_there, named)), combinations)


def _split(combination: Sequence[str]) -> str:
    share = _number(*combination) % 10
    return "test" if share == 0 else "validation" if share == 1 else "train"


def _place(wish: Wish) -> int:
    """Return its place in an order that mixes all objects."""
    return _number("order", wish.prompt)


def _number(*words: str) -> int:
    return zlib.crc32(" ".join(words).encode())


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _there(name: str) -> str:
    return f"Is there {_a(name)} in the picture?"
