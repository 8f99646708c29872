"""Damaged checkpoints: the damage is noticed and named, and the checkpoint before is used."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from faults.children import preload
from faults.kills import Reference
from faults.outcome import Outcome
from faults.runs import make_runs


def flip(path: Path, draw: random.Random) -> None:
    """Changes one bit somewhere."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    """Takes some of the end away."""
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def empty(path: Path, draw: random.Random) -> None:
    """Leaves nothing in it."""
    path.write_bytes(b"")


def delete(path: Path, draw: random.Random) -> None:
    """Removes it."""
    path.unlink()


def grow(path: Path, draw: random.Random) -> None:
    """Adds some bytes."""
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 100)))


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (flip, cut, empty, delete, grow)


def campaign(folder: Path, seed: int, count: int) -> Iterator[Outcome]:
    """`count` damages to a checkpoint, in every file in turn."""
    preload(("text",))
    draw = random.Random(seed)
    (kind,) = make_runs(folder, ("text",))
    Reference.of(kind, folder / kind.name)
    run = folder / kind.name / "uninterrupted"
    newest = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    unused = ("_CHECKPOINT_METADATA", "commit_success.txt")  # nothing depends on them
    files = [path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size]
    names = [path.relative_to(newest) for path in files if path.name not in unused]
    for number in range(count):
        name, damage = names[number % len(names)], DAMAGES[number // len(names) % len(DAMAGES)]
        yield _noticed(newest, folder / "damaged", name, damage, draw, f"{damage.__name__} {name}")


def _noticed(
    sound: Path, to: Path, name: Path, damage: Callable[[Path, random.Random], None], draw: random.Random, case: str
) -> Outcome:
    from grpo_jax.runs.checkpoint import MANIFEST, find_damage

    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(sound, to)
    damage(to / name, draw)
    said = find_damage(to)
    named = str(name) in said or (bool(said) and name.name == MANIFEST)  # which then tells wrongly of another file
    return Outcome(case, named, None, "" if named else f"said {said!r}")
