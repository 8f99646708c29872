"""Recommend the next items for a user's history with a trained run.

On the command line:

    python -m grpo_jax.recommend --run DIR --history "title | title" [--k 10] [--exclude FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

from grpo_jax.errors import UserError, command, complain, exit_process, extras_named, one_line, run_parser, short_name
from grpo_jax.predict import make_rewriter, read_lines

SEPARATOR = "|"


@extras_named()
def load_recommender(run_dir: str | Path, checkpoint: str = "final") -> Any:
    """Return recommend(titles, k=10) → best items, for a run whose task recommends.

    A repeated title counts once, at its last position; an unknown title is skipped. Further arguments are `exclude`,
    items that are never recommended, and `note`, which gets a line about skipped titles.

    Args:
        run_dir: Run directory of a training run.
        checkpoint: "final", "best", or a step.

    Raises:
        UserError: There is no such run or checkpoint, or its task recommends nothing.
    """
    from grpo_jax.runs.policy import restore_policy, run_config, saved_task

    if not hasattr(run_config(run_dir).task, "recommender"):
        raise UserError(f"{short_name(run_dir)}: its task recommends nothing")
    config, policy, meta = restore_policy(run_dir, checkpoint)
    return config.task.recommender(config, policy, functools.partial(make_rewriter, config, policy), saved_task(meta))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = run_parser("recommend", "Recommend a user's next items with a trained policy.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--history", help=f"Titles or ids, oldest first, with {SEPARATOR} between them.")
    source.add_argument("--file", metavar="FILE", help="A history on each line; prints JSON, a line for each.")
    parser.add_argument("--k", type=int, default=10, help="Items (default: %(default)s).")
    parser.add_argument("--exclude", metavar="FILE", help="Never recommend these: a title or id on each line.")
    parser.add_argument("--json", action="store_true", help="Print JSON only.")
    return parser


def _recommend(options: argparse.Namespace) -> None:
    from grpo_jax.runs.compile_cache import enable_compile_cache

    enable_compile_cache()
    if options.k < 1:
        raise UserError(f"--k: expected a number >= 1, got {options.k}")
    lines = [(0, options.history)] if options.file is None else read_lines(options.file)
    exclude = [] if options.exclude is None else [line.strip() for _, line in read_lines(options.exclude, "exclude")]
    recommend = functools.partial(load_recommender(options.run, options.checkpoint), exclude=exclude)
    for number, line in lines:
        titles, notes = [title.strip() for title in line.split(SEPARATOR) if title.strip()], []
        try:
            items = recommend(titles, options.k, note=notes.append)
        except UserError as error:
            raise UserError(f"{options.file}:{number}: {error}" if number else str(error)) from error
        note = "; ".join(notes)
        if options.json or options.file is not None:
            answer = {"history": titles, "items": [item._asdict() for item in items]}
            print(json.dumps(answer | ({"note": note} if note else {}), ensure_ascii=False))
            continue
        for place, item in enumerate(items, 1):
            print(f"{place:>3}  {item.score:8.3f}  {one_line(item.title or f'({item.item}, no title)', 90)}")
        if note:
            complain(f"note: {note}")


main = command(make_parser, _recommend)

if __name__ == "__main__":
    exit_process(main())
