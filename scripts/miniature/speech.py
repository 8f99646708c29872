"""The two grammars of the miniature's captions, and the package's casual prompts.

The *canonical* grammar names all six attributes, one word each, in one fixed form; the renderer was trained on it only.
The *casual* grammar has other words, a loose order, and missing attributes.

    python -m scripts.miniature.speech      # writes bridges/miniature/world_prompts.jsonl.gz and that of the scenes
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridges.miniature.world import ATTRIBUTES, PALETTE, VALUES

ALWAYS_REQUESTED = ("shape", "colour")
DEFAULTS = {"size": "medium", "position": "center", "background": "white", "sharpness": "sharp"}
"""The oracle's words for attributes not requested (a white shape gets a black background)."""
SYNONYMS: dict[str, tuple[str, str]] = {
    "circle": ("disc", "dot"),
    "square": ("box", "block"),
    "triangle": ("pyramid", "wedge"),
    "star": ("asterisk", "sparkle"),
    "cross": ("plus", "crossing"),
    "ring": ("donut", "hoop"),
    "red": ("crimson", "scarlet"),
    "green": ("emerald", "mossy"),
    "blue": ("cobalt", "sapphire"),
    "yellow": ("golden", "lemon"),
    "purple": ("violet", "plum"),
    "cyan": ("aqua", "turquoise"),
    "white": ("snowy", "ivory"),
    "black": ("ebony", "inky"),
    "small": ("tiny", "little"),
    "medium": ("average", "moderate"),
    "large": ("huge", "giant"),
    "center": ("middle", "midway"),
    "top": ("upper", "north"),
    "bottom": ("lower", "south"),
    "left": ("west", "leftward"),
    "right": ("east", "rightward"),
    "sharp": ("crisp", "detailed"),
    "blurry": ("fuzzy", "hazy"),
}
"""The casual words of each canonical word; the renderer has never seen any of them."""
OPENINGS = ("", "gimme", "draw me", "i want", "please make", "how about", "show me")
POSITION_PHRASES = ("toward {}", "somewhere {}", "{} side")
BACKGROUND_PHRASES = ("against {}", "over {}", "with {} behind")
CANONICAL_FORM = "a {sharpness} {size} {colour} {shape} at the {position} on {background}"
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Scene:
    """One picture's six attributes, as canonical words; shape and background differ in colour."""

    shape: str
    colour: str
    size: str
    position: str
    background: str
    sharpness: str


def scene_of(row: np.ndarray) -> Scene:
    """The scene of attributes as positions in `VALUES`, i64[6]."""
    return Scene(*(VALUES[name][int(i)] for name, i in zip(ATTRIBUTES, row, strict=True)))


def split_of(shape: str, colour: str) -> str:
    """The split of a (shape, colour) pair.

    A Latin pattern: of 48 pairs 12 are for testing and 6 for validation, and every word remains in training. No
    prompt of one split names a pair of another, since prompts always name both.
    """
    s, c = VALUES["shape"].index(shape), VALUES["colour"].index(colour)
    return {0: "test", 3: "test", 5: "validation"}.get((c - s) % 8, "train")


def sample_indices(rng: np.random.Generator, count: int) -> np.ndarray:
    """Uniform scenes of every split, i64[count, 6], background never the shape's colour."""
    rows = np.stack([rng.integers(len(VALUES[name]), size=count) for name in ATTRIBUTES], axis=1)
    rows[:, 4] = (rows[:, 1] + rng.integers(1, len(PALETTE), size=count)) % len(PALETTE)
    return rows


def sample_scene(rng: np.random.Generator, split: str | None = None) -> Scene:
    """One scene, of ``split`` if given."""
    while True:
        scene = scene_of(sample_indices(rng, 1)[0])
        if split is None or split_of(scene.shape, scene.colour) == split:
            return scene


def canonical_caption(scene: Scene) -> str:
    """The one complete caption of a scene, in the renderer's language."""
    return CANONICAL_FORM.format(**{name: getattr(scene, name) for name in ATTRIBUTES})


def complete(requested: dict[str, str]) -> Scene:
    """The scene that has the requested attributes, and the defaults for the rest."""
    words = {**DEFAULTS, **requested}
    if words["colour"] == words["background"]:
        words["background"] = "black"
    return Scene(**words)


def oracle_rewrite(requested: dict[str, str]) -> str:
    """The best rewrite of a request: canonical, complete, nothing requested lost."""
    return canonical_caption(complete(requested))


def phrase(rng: np.random.Generator, words: dict[str, str]) -> str:
    """One casual sentence that says `words` (attribute → word to use), in loose order."""
    noun = " ".join(words[k] for k in ("size", "sharpness", "colour", "shape") if k in words)
    if rng.random() < 0.5 and {"size", "sharpness"} <= words.keys():
        noun = " ".join(words[k] for k in ("sharpness", "size", "colour", "shape") if k in words)
    tails = []
    if "position" in words:
        tails.append(POSITION_PHRASES[rng.integers(len(POSITION_PHRASES))].format(words["position"]))
    if "background" in words:
        tails.append(BACKGROUND_PHRASES[rng.integers(len(BACKGROUND_PHRASES))].format(words["background"]))
    if len(tails) == 2 and rng.random() < 0.5:
        tails.reverse()
    start = OPENINGS[rng.integers(len(OPENINGS))]
    return " ".join(part for part in (start, noun, *tails) if part)


def casual_prompt(rng: np.random.Generator, scene: Scene, keep: float = 0.75) -> tuple[str, dict[str, str]]:
    """Return a casual prompt for a scene, and the requested attributes as canonical words.

    `keep` is the chance that each attribute other than shape and colour is said at all.
    """
    requested = {k: getattr(scene, k) for k in ATTRIBUTES if k in ALWAYS_REQUESTED or rng.random() < keep}
    words = {k: SYNONYMS[v][rng.integers(2)] for k, v in requested.items()}
    return phrase(rng, words), requested


def prompts(split: str, count: int, seed: int = 0) -> list[dict]:
    """The built-in data set; its columns travel to the rewards.

    No (shape, colour) pair occurs in two splits ("train", "validation", "test"). Within one call every row's text is
    different.

    Returns:
        Rows ``{"prompt": text, "requested": {attribute: canonical word}, "oracle": text}``.
    """
    rng = np.random.default_rng([seed, SPLITS.index(split)])
    rows: dict[str, dict] = {}
    while len(rows) < count:
        text, requested = casual_prompt(rng, sample_scene(rng, split))
        rows.setdefault(text, {"prompt": text, "requested": requested, "oracle": oracle_rewrite(requested)})
    return list(rows.values())


COUNTS = {"train": 2048, "validation": 1024, "test": 2048}
"""Requests of each split in a file."""
FOLDER = Path(__file__).parents[2] / "bridges" / "miniature"


def lines(make: Callable[[str, int], list[dict]]) -> str:
    """Return the text of a file of requests."""
    rows = [{"split": split} | row for split, count in COUNTS.items() for row in make(split, count)]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def write(name: str, make: Callable[[str, int], list[dict]]) -> None:
    """Write a file of requests, the same bytes each time."""
    (FOLDER / f"{name}_prompts.jsonl.gz").write_bytes(gzip.compress(lines(make).encode(), mtime=0))


if __name__ == "__main__":
    from scripts.miniature import speech_scenes

    write("world", prompts)
    write("scenes", speech_scenes.prompts)
