"""What a run's folder keeps of its end, written and read again: pictures, episodes, tables, and how it was begun."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config.build import typed
from grpo_jax.config.files import load_json, read_text
from grpo_jax.errors import UserError, one_line
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


_SUMMARY: Mapping[str, Any] = {
    "iterations": int,
    "prompts": int,
    "evaluation": dict[str, dict[str, float | None]],
    "best": dict[str, float | None] | None,
    "seconds": dict[str, float | None],
    "versions": dict[str, str],
    "samples": dict[str, Any],
}
"""What pages and cards compute with, where a summary has it."""
_SAMPLES = dict[str, dict[str, dict[str, list[float | None] | None]]]


def read_summary(run: RunDirectory, rows: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What summary.json holds; nothing of a run that has not finished, or goes on after it had.

    Args:
        run: Whose.
        rows: Of its metrics.jsonl.

    Raises:
        UserError: It is damaged.
    """
    summary = load_json(run.summary) if run.summary.exists() else {}
    try:
        for name in _SUMMARY.keys() & summary.keys():
            typed(_SUMMARY[name], summary[name], name)
        typed(_SAMPLES, summary.get("samples", {}).get("measures", {}), "samples.measures")
    except UserError as error:
        raise UserError(f"{run.summary}: {error}") from error
    return {} if rows and summary.get("iterations", rows[-1]["step"]) < rows[-1]["step"] else summary


def _read_kept(run: RunDirectory) -> Kept:
    told = load_json(run.kept) if run.kept.exists() else {"tables": [], "starts": [0], "config": _config(run)}
    names = (run.images / name for name in ("gallery.json", "episodes.json"))
    gallery, episodes = (load_json(path, list) if path.exists() else [] for path in names)
    try:
        return Kept(
            [_entry(run.images, f"{place:03d}", entry) for place, entry in enumerate(gallery)],
            [_episode(run.images, f"{place:03d}", entry) for place, entry in enumerate(episodes)],
            [_table(**table) for table in told["tables"]],
            typed(list[int], told["starts"], "starts"),
            typed(str, told["config"], "config"),
        )
    except (KeyError, TypeError, AttributeError, ValueError, UserError) as error:
        raise UserError(f"{run.path}: report.json or images/ is not as a run writes it ({one_line(error)})") from error


def _config(run: RunDirectory) -> str:
    return read_text(run.config) if run.config.is_file() else ""


def _table(title: str, columns: list[str], rows: list[list[Any]], note: str = "") -> Table:
    return Table(str(title), typed(list[str], columns, "columns"), typed(list[list[Any]], rows, "rows"), str(note))


def _entry(folder: Path, name: str, entry: Mapping[str, Any]) -> GalleryEntry:
    before, after = (_picture(folder / f"{name}_{kind}.png") for kind in ("before", "after"))
    pairs = typed(dict[str, list[float | None]], entry["scores"], "scores")
    scores = {measure: (first, second) for measure, (first, second) in pairs.items()}
    return GalleryEntry(str(entry["prompt"]), str(entry["rewrite"]), before, after, scores, shown=_shown(folder, name))


def _episode(folder: Path, name: str, entry: Mapping[str, Any]) -> EpisodeEntry:
    turns = [
        ShownTurn(
            str(turn["text"]),
            typed(dict[str, float | None], turn["scores"], "scores"),
            _picture(folder / f"{name}_turn_{number}.png"),
            typed(str | None, turn["answer"], "answer"),
            _shown(folder, f"{name}_turn_{number}"),
        )
        for number, turn in enumerate(entry["turns"], 1)
    ]
    return EpisodeEntry(str(entry["prompt"]), turns, _shown(folder, f"{name}_episode"))


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
