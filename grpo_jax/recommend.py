"""Items from a trained run: what a user of some history wants next.

On the command line:

    python -m grpo_jax.recommend --run DIR --history "title | title" [--k 10] [--exclude FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_jax.errors import (
    UserError,
    complain,
    exit_process,
    extras_named,
    one_line,
    read_options,
    run_cli,
    run_parser,
    short_name,
)
from grpo_jax.predict import make_rewriter, read_lines

if TYPE_CHECKING:
    from grpo_jax.config.run import Config
    from grpo_jax.models.policy import Policy

SEPARATOR = "|"


@extras_named()
def load_recommender(run_dir: str | Path, checkpoint: str = "final") -> Any:
    """Return recommend(titles, k=10) of a run whose task recommends: its best items.

    A title that stands several times counts once, in its last place; one that is no item's is skipped. Its further
    arguments are `exclude`, items that are never recommended, and `note`, which gets a line on what was skipped.

    Args:
        run_dir: Run directory of a training run.
        checkpoint: "final", "best", or a step.

    Raises:
        UserError: There is no such run or checkpoint, or its task recommends nothing.
    """
    config, policy = _restored(run_dir, checkpoint)
    writer = functools.partial(make_rewriter, config, policy)
    return config.task.recommender(config, policy, writer)


def _restored(run_dir: str | Path, checkpoint: str) -> tuple[Config, Policy]:
    from grpo_jax.runs.policy import restore_policy, run_config

    if not hasattr(run_config(run_dir).task, "recommender"):
        raise UserError(f"{short_name(str(run_dir))}: its task recommends nothing")
    config, policy, _ = restore_policy(run_dir, checkpoint)
    return config, policy


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = run_parser("recommend", "Asks a trained run for items that a user wants next.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--history", help=f"Titles or ids, oldest first, with {SEPARATOR} between them.")
    source.add_argument("--file", metavar="FILE", help="A history on each line; prints JSON, a line for each.")
    parser.add_argument("--k", type=int, default=10, help="Items (default: %(default)s).")
    parser.add_argument("--exclude", metavar="FILE", help="Never recommend these: a title or id on each line.")
    parser.add_argument("--json", action="store_true", help="Print JSON alone.")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_cli(lambda words: _recommend(read_options(make_parser(), words)), arguments)


def _recommend(options: argparse.Namespace) -> None:
    from grpo_jax.runs.processes import enable_compile_cache

    enable_compile_cache()
    if options.k < 1:
        raise UserError(f"--k: expected a number >= 1, got {options.k}")
    lines = None if options.file is None else read_lines(options.file)
    exclude = [] if options.exclude is None else [line.strip() for _, line in read_lines(options.exclude, "exclude")]
    recommender = load_recommender(options.run, options.checkpoint)
    ask = functools.partial(ask_for, functools.partial(recommender, exclude=exclude), options.k)
    if lines is not None:
        return _answer_lines(lines, str(options.file), ask)
    items, record = ask(titles_of(options.history))
    if options.json:
        print(json.dumps(record, ensure_ascii=False))
        return
    _print(items)
    if "note" in record:
        complain(f"warning: {record['note']}")


def ask_for(recommender: Any, k: int, titles: Sequence[str]) -> tuple[Sequence[Any], dict[str, object]]:
    """Return the items for a history, and all of the answer as JSON has it."""
    notes: list[str] = []
    items = recommender(titles, k, note=notes.append)
    record: dict[str, object] = {"history": titles, "items": [item._asdict() for item in items]}
    if notes:
        record["note"] = "; ".join(notes)
    return items, record


def _answer_lines(lines: Sequence[tuple[int, str]], path: str, ask: Any) -> None:
    """Print the answer to each line, or why there is none; a UserError if no line could be answered."""
    errors = []
    for number, line in lines:
        titles = titles_of(line)
        try:
            _, record = ask(titles)
        except UserError as error:
            errors.append(f"{path}:{number}: {error}")
            record = {"history": titles, "items": [], "error": errors[-1]}
        print(json.dumps(record, ensure_ascii=False))
    if errors and len(errors) == len(lines):
        raise UserError(f"none of {len(lines)} lines could be answered: {errors[0]}")
    if errors:
        complain(f"warning: {len(errors)} of {len(lines)} lines could not be answered: {one_line(errors[0], 300)}")


def titles_of(line: str) -> list[str]:
    """Return the titles of a history."""
    return [title.strip() for title in line.split(SEPARATOR) if title.strip()]


def _print(items: Sequence[Any]) -> None:
    for place, item in enumerate(items, 1):
        print(f"{place:>3}  {item.score:8.3f}  {one_line(item.title or f'({item.item}, no title)', 90)}")


if __name__ == "__main__":
    exit_process(main())
