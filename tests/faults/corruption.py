"""Checkpoints that a disk, or somebody, has damaged: noticed, named, and the one before is used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from faults.children import preload, value_of
from faults.kills import Reference, train
from faults.outcome import Outcome
from faults.runs import Tried, differences, make_runs, outcome_of


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


def files_of(checkpoint: Path) -> list[Path]:
    """Its files, those that are empty already left out."""
    return [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.stat().st_size]


def campaign(folder: Path, seed: int, count: int) -> Iterator[Outcome]:
    """`count` damages to a checkpoint, in every file in turn; one in 47 is gone on from by the real command."""
    preload(("cartpole",))
    draw = random.Random(seed)
    (kind,) = make_runs(folder, ("cartpole",))
    reference = Reference.of(kind, folder / kind.name)
    run = folder / kind.name / "uninterrupted"
    newest = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    names = [path.relative_to(newest) for path in files_of(newest)]
    for number in range(count):
        name, damage = names[number % len(names)], DAMAGES[number // len(names) % len(DAMAGES)]
        case = f"{damage.__name__} {name}"
        if number % 47 == 0:
            yield _resumed(kind, reference, newest.relative_to(run), name, damage, draw, case)
        else:
            yield _noticed(newest, folder / "damaged", name, damage, draw, case)


def _noticed(
    sound: Path, to: Path, name: Path, damage: Callable[[Path, random.Random], None], draw: random.Random, case: str
) -> Outcome:
    from grpo_jax.runs.series import MANIFEST, find_damage

    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(sound, to)
    damage(to / name, draw)
    said = find_damage(to)
    named = str(name) in said or (bool(said) and name.name == MANIFEST)  # which then tells wrongly of another file
    return Outcome(case, named, None, "" if named else f"said {said!r}")


def _resumed(
    kind: Tried,
    reference: Reference,
    checkpoint: Path,
    name: Path,
    damage: Callable[[Path, random.Random], None],
    draw: random.Random,
    case: str,
) -> Outcome:
    """A finished run, its end removed and its newest step damaged, goes on from the step before."""
    folder = kind.config.parent
    run = folder / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "uninterrupted", run)
    shutil.rmtree(run / "checkpoints" / "final")
    (run / "summary.json").unlink()
    damage(run / checkpoint / name, draw)
    ended = train(kind, run)
    if ended.code != 0 or f"{checkpoint.name} is damaged (" not in ended.out:
        return Outcome(f"{case}, resumed", False, None, (ended.err or ended.out)[-300:])
    different = differences(value_of(outcome_of, run, folder=folder), reference.outcome)
    return Outcome(f"{case}, resumed", True, not different, different)
