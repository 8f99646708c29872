"""Prompts and rewards passed to `run` in Python: checked, named in the run's config, and stored beside it.

The run can thus be resumed and evaluated like any other, on the same rows, whose ids determine the random numbers. The
reward functions are the same if they can be imported.
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config.copies import own_copy
from grpo_jax.config.fields import require
from grpo_jax.config.files import parse_json
from grpo_jax.config.named import IN_PYTHON, import_path
from grpo_jax.config.run import Config
from grpo_jax.config.sections import DataSection, RewardSection
from grpo_jax.errors import UserError, one_line, short_repr
from grpo_jax.models.hf.chat import Message
from grpo_jax.rollout.data import FACTS, SPLITS, PromptSet, Row, Rows, facts_of
from grpo_jax.rollout.pictures import as_text, source_of
from grpo_jax.rollout.prompts import load_prompts
from grpo_jax.rollout.records import dataset_records, read_lines
from grpo_jax.rollout.rewards import Reward
from grpo_jax.runs.directory import RunDirectory, write_atomically
from grpo_jax.runs.session import Record


class PythonInput(NamedTuple):
    """The config with `run`'s Python input, the prompts (None for the config's), and the rewards by label."""

    config: Config
    prompts: PromptSet | None
    rewards: dict[str, Reward]


def from_python(config: Config, prompts: object, rewards: object) -> PythonInput:
    """Check prompts and rewards, and write them into the config."""
    rows, functions = None, {}
    if prompts is not None:
        rows = _prompt_set(prompts, config.data)
        config = config.replace(data=config.data.replace(prompts=IN_PYTHON))
    if rewards is not None:
        functions = _by_label(rewards)
        config = config.replace(rewards=_sections(config.rewards, functions))
    return PythonInput(config, rows, functions)


def keep_prompts(source: PythonInput, directory: RunDirectory, warning: Callable[[str], None]) -> None:
    """Write the rows to prompts.jsonl; UserError if a resumed run started with other rows."""
    if (prompts := source.prompts) is None:
        return
    try:
        if not source.config.resume:
            write_atomically(directory.prompts, _lines(prompts))
        elif directory.prompts.is_file():
            with directory.prompts.open("rb") as file:
                if not all(itertools.starmap(_same, itertools.zip_longest(file, _lines(prompts)))):
                    again = f"{directory.path} began with; leave prompts out"
                    raise UserError(f"--resume: the prompts are not those that {again}")
    except TypeError as error:
        needed = "the prompts are not kept, and --resume and evaluate of this run need run(prompts=...)"
        warning(f"{one_line(error)}: {needed}")


def _lines(prompts: PromptSet) -> Iterator[bytes]:
    """Yield a JSON line for each row; pictures as paths, or as base64 of those in memory."""
    for split, part in zip(SPLITS, prompts, strict=True):
        for row in part:
            literals = _literals(row.columns)
            line = {"id": row.id, "split": split, "prompt": row.prompt, "columns": row.columns | literals}
            if literals:
                line["literals"] = [*literals]
            if row.pictures:
                line["pictures"] = [as_text(source) for source in row.pictures]
            if row.messages:
                line["messages"] = [[message.role, list(message.parts)] for message in row.messages]
            yield f"{json.dumps(line)}\n".encode()


def _literals(columns: Record) -> dict[str, str]:
    """Return as Python literals the values that JSON changes, such as tuples; TypeError for one that has none."""
    literals = {}
    for name, value in columns.items():
        with suppress(TypeError):
            if repr(json.loads(json.dumps(value))) == repr(value):
                continue
        with suppress(ValueError, SyntaxError):
            if ast.literal_eval(repr(value)) == value:
                literals[name] = repr(value)
                continue
        raise TypeError(f"the column {name} has no JSON and no Python literal ({short_repr(value)})")
    return literals


def _same(stored: bytes | None, line: bytes | None) -> bool:
    """Return whether two lines hold one row, whatever the order of its sets."""
    if stored == line or stored is None or line is None:
        return stored == line
    return _row(parse_json(stored)) == _row(parse_json(line))


def kept_prompts(directory: RunDirectory) -> PromptSet:
    """Read the rows that `keep_prompts` wrote; UserError if they are missing, or in another format."""
    if not directory.prompts.is_file():
        raise UserError(
            f"data.prompts: run() was given the prompts in Python and {directory.prompts} does not keep them: call "
            "run(config, prompts=...) again (with resume=True to continue or to measure)"
        )
    records = read_lines(directory.prompts, parse_json)
    facts = bytearray()
    line: Any
    for place, (number, line) in enumerate(records.all()):
        try:
            facts += np.array([facts_of(_row(line), place, SPLITS.index(line["split"]))], FACTS).tobytes()
        except (KeyError, TypeError, ValueError, AttributeError, SyntaxError) as error:
            reason = line if isinstance(line, str) else f"no row as a run keeps it, {one_line(error)}"
            raise UserError(f"{directory.prompts}, line {number}: {reason}; call run(config, prompts=...)") from error

    def make(place: int) -> Row:
        ((_, line),) = records.read(place, place + 1)
        return _row(line)  # type: ignore[arg-type]

    rows = Rows(make, np.frombuffer(facts, FACTS))
    return PromptSet(*(rows.take(rows.facts["split"] == part) for part in range(len(SPLITS))))


def _row(line: Record) -> Row:
    pictures = tuple(source_of(source, None) for source in line.get("pictures", ()))
    messages = tuple(Message(role, tuple(parts)) for role, parts in line.get("messages", ()))
    literals = {name: ast.literal_eval(line["columns"][name]) for name in line.get("literals", ())}
    return Row(line["id"], line["prompt"], line["columns"] | literals, pictures, messages)


def _prompt_set(prompts: Any, section: DataSection) -> PromptSet:
    for name in ("validation", "test"):
        require(not getattr(section, name), f"data.{name}", "nothing beside run(prompts=…)", getattr(section, name))
    if isinstance(prompts, PromptSet):
        return prompts
    how: Record = {"held_out": section.held_out, "columns": section.columns}
    expected = "prompts: expected a list of texts or of records {'prompt': text, column: value, …}"
    if (records := dataset_records(prompts, "prompts")) is not None:
        return load_prompts(records, **how)
    if hasattr(prompts, "to_dict") and hasattr(prompts, "itertuples"):  # pandas: iteration gives column names
        require(prompts.columns.is_unique, "prompts", "a table that names each column once", [*prompts.columns])
        prompts = prompts.astype(object).where(prompts.notna(), None).to_dict("records")
    if isinstance(prompts, str | bytes | Mapping) or not hasattr(prompts, "__iter__"):
        raise UserError(f"{expected}, got a {type(prompts).__name__}")
    listed = [{"prompt": row} if isinstance(row, str) else row for row in prompts]
    for place, record in enumerate(listed):
        if not isinstance(record, Mapping):
            raise UserError(f"{expected}, got a {type(record).__name__} as row {place}")
    # Pictures stay shared: they may be files that nobody has read.
    plain = [{key: own_copy(_as_read(one), arrays=False) for key, one in row.items()} for row in listed]
    return load_prompts(plain, **how)


def _as_read(value: Any) -> object:
    """Return a NumPy number, or a list as pandas reads it from Parquet, as Python's own."""
    own = isinstance(value, np.generic | np.ndarray) and (value.ndim == 0 or value.dtype.hasobject)
    return value.tolist() if own else value


def _by_label(rewards: Any) -> dict[str, Reward]:
    """Return the functions by their names in metrics: their own names, or the keys of a mapping."""
    if isinstance(rewards, Mapping):
        named = list(rewards.items())
    else:
        functions = [rewards] if callable(rewards) or isinstance(rewards, str) else list(rewards)
        named = [(getattr(function, "__name__", type(function).__name__), function) for function in functions]
    if wrong := [short_repr(function) for _, function in named if not callable(function)]:
        other = f"{', '.join(wrong)} (config.rewards takes import paths and weights)"
        raise UserError(f"rewards: expected functions, got {other}")
    expected = "at least one function, each of another name (or {'name': function})"
    require(0 < len(dict(named)) == len(named), "rewards", expected, [name for name, _ in named])
    return dict(named)  # pyright: ignore[reportReturnType] all are callable


def _sections(sections: Sequence[RewardSection], functions: Mapping[str, Reward]) -> list[RewardSection]:
    """Return each function's section: the config's section of that name (weight, condition, options), or a default."""
    configured = {section.called: section for section in sections}
    if unmatched := [label for label in configured if label not in functions]:
        names = f"config.rewards names {', '.join(unmatched)}, but the functions given are {', '.join(functions)}"
        raise UserError(f"rewards: {names}: give one of that name, or take the entry out")
    resolved = []
    for label, function in functions.items():
        name = import_path(function, label)
        named = {"name": name, "label": "" if name.endswith(f":{label}") else label}
        resolved.append(configured.get(label, RewardSection(name=label)).replace(**named))
    return resolved
