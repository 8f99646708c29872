"""What a run's folder keeps of its end, written and read again: pictures, episodes, tables, and how it was begun."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.errors import UserError, one_line, shown
from grpo_jax.reports.completions import MEGABYTES, read_completions
from grpo_jax.rollout.inputs.pictures import File, read_rgb
from grpo_jax.runs.directory import RunDirectory, finite, read_metrics, write_atomically
from grpo_jax.tasks.display import EpisodeEntry, GalleryEntry, ShownTurn, Table


class Kept(NamedTuple):
    """What report.html shows that stands in no other file of a run.

    Attributes:
        gallery: Pairs of texts or pictures; kept in images/.
        episodes: As they went; kept in images/.
        tables: Rewards per prompt, most added words, …
        starts: Iterations done when a process began.
        config: The configuration of the last process, as YAML.
    """

    gallery: Sequence[GalleryEntry] = ()
    episodes: Sequence[EpisodeEntry] = ()
    tables: Sequence[Table] = ()
    starts: Sequence[int] = ()
    config: str = ""


def keep(run: RunDirectory, kept: Kept) -> None:
    """Writes images/ and report.json.

    Raises:
        UserError: The disk is full.
    """
    run.write_images(kept.gallery)
    run.write_episodes(kept.episodes)
    tables = [{**table._asdict(), "rows": [list(map(_plain, row)) for row in table.rows]} for table in kept.tables]
    told = {"tables": tables, "starts": kept.starts, "config": kept.config}
    write_atomically(run.kept, json.dumps(finite(told), indent=1) + "\n")


def contents(
    run: RunDirectory, megabytes: float = MEGABYTES, *, summary: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the folder of a run holds for its page: the arguments of `page.write_report`, all but `path` and `display`.

    Args:
        run: Finished or not.
        megabytes: Of completions.
        summary: Of a run that is about to write it.

    Raises:
        UserError: A file of it is damaged.
    """
    rows = read_metrics(run.metrics)
    summary = read_summary(run, rows) if summary is None else finite(summary)
    kept = _read_kept(run) if summary else Kept(starts=(0,), config=_config(run))
    return {
        "title": run.path.name,
        "summary": summary,
        "metrics_rows": rows,
        "gallery": kept.gallery,
        "episodes": kept.episodes,
        "tables": kept.tables,
        "starts": kept.starts,
        "config_text": kept.config,
        "completions": read_completions(run.completions, megabytes),
    }


def read_summary(run: RunDirectory, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What summary.json holds; nothing of a run that has not finished, or goes on after it had.

    Args:
        run: Whose.
        rows: Of its metrics.jsonl.

    Raises:
        UserError: It is damaged.
    """
    summary = _read_json(run.summary) or {}
    if not isinstance(summary, dict):
        raise UserError(f"{run.summary}: expected an object, got {shown(summary)}")
    return {} if rows and summary.get("iterations", rows[-1]["step"]) < rows[-1]["step"] else summary


def _read_kept(run: RunDirectory) -> Kept:
    told = _read_json(run.kept) or {"tables": [], "starts": [0], "config": _config(run)}
    gallery, episodes = (_read_json(run.images / name) or [] for name in ("gallery.json", "episodes.json"))
    try:
        return Kept(
            [_entry(run.images, f"{place:03d}", entry) for place, entry in enumerate(gallery)],
            [_episode(run.images, f"{place:03d}", entry) for place, entry in enumerate(episodes)],
            [Table(**table) for table in told["tables"]],
            told["starts"],
            told["config"],
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{run.path}: report.json or images/ is not as a run writes it ({one_line(error)})") from error


def _config(run: RunDirectory) -> str:
    return run.config.read_text(encoding="utf-8", errors="replace") if run.config.is_file() else ""


def _read_json(path: Path) -> Any:
    """None where there is no such file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from error


def _entry(folder: Path, name: str, entry: Mapping[str, Any]) -> GalleryEntry:
    before, after = (_picture(folder / f"{name}_{kind}.png") for kind in ("before", "after"))
    scores = {measure: (first, second) for measure, (first, second) in entry["scores"].items()}
    return GalleryEntry(entry["prompt"], entry["rewrite"], before, after, scores, shown=_shown(folder, name))


def _episode(folder: Path, name: str, entry: Mapping[str, Any]) -> EpisodeEntry:
    turns = [
        ShownTurn(
            turn["text"],
            turn["scores"],
            _picture(folder / f"{name}_turn_{number}.png"),
            turn["answer"],
            _shown(folder, f"{name}_turn_{number}"),
        )
        for number, turn in enumerate(entry["turns"], 1)
    ]
    return EpisodeEntry(entry["prompt"], turns, _shown(folder, f"{name}_episode"))


def _shown(folder: Path, name: str) -> list[np.ndarray]:
    """What stands there as NAME_shown_0.png, NAME_shown_1.png, …"""
    pictures = (_picture(folder / f"{name}_shown_{number}.png") for number in itertools.count())
    return [
        picture for picture in itertools.takewhile(lambda found: found is not None, pictures) if picture is not None
    ]


def _picture(path: Path) -> np.ndarray | None:
    return np.asarray(read_rgb(File(path, path.name))) if path.is_file() else None


def _plain(cell: Any) -> Any:
    """A cell as a table shows it: numbers are numbers, all else is text."""
    cell = cell.item() if isinstance(cell, np.generic) else cell
    return cell if cell is None or isinstance(cell, int | float) else str(cell)
