"""What must be the same in all processes of a run, compared at its start: config, code, files, data.

A run whose processes differ in any of it would train a policy that nobody asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import jax

from grpo_jax.config.build import to_dict
from grpo_jax.errors import UserError, complain, short_repr
from grpo_jax.models.broadcast import broadcast, client, is_main_process, meet, process_count, process_index, together
from grpo_jax.rollout.data import SPLITS, PromptSet

_WAIT_MS = 24 * 3_600_000  # the watch ends what is stuck
_OWN = ("run_dir", "debug")  # fields that may differ
_PACKAGES = ("grpo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")
_BLOCK = 2**20
_WHOLE = 64  # blocks of a file that are read; of a larger one so many, spread evenly
_FILES = 256  # files of a folder that are read; of others name and size count
_ROWS = 64
_SHARED_SECONDS = 10.0  # how long a network file system may hide a new file

Facts = dict[str, str]
"""By name: what is compared, as a short text."""


def require_same_facts(stage: str, gather: Callable[[], Facts]) -> None:
    """Compare facts over all processes; in all of them UserError names the first that differs.

    One process has nothing to compare, and does not gather them.
    """
    count = process_count()
    if count == 1:
        return
    facts = gather()
    key = f"grpo_jax/{stage}/"
    with together("the comparison of the processes"):
        try:
            if not is_main_process():
                client().key_value_set(f"{key}{process_index()}", json.dumps(facts))
                refusal = client().blocking_key_value_get(f"{key}verdict", _WAIT_MS)
            else:
                others = (client().blocking_key_value_get(f"{key}{n}", _WAIT_MS) for n in range(1, count))
                differences = [_difference(facts, json.loads(theirs), n) for n, theirs in enumerate(others, 1)]
                refusal = next(filter(None, differences), "")
                client().key_value_set(f"{key}verdict", refusal)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            reason = (
                "it was started again while its run goes on, which it cannot join any more: end all processes, and "
                "start them with --resume"
            )
            complain(f"error: process {process_index()}: {reason}")  # the command prints for process 0 alone
            raise UserError(reason) from error
    if refusal:
        raise UserError(refusal)


def _difference(facts: Facts, theirs: Facts, number: int) -> str:
    for name in [*facts, *theirs]:
        here, there = facts.get(name, "nothing"), theirs.get(name, "nothing")
        if here != there:
            got = f"{here} in process 0 and {there} in process {number}"
            return f"{name}: expected the same in all processes, got {got}"
    return ""


def start_facts(config: object) -> Facts:
    """Return config, code and packages; paths that exist count by what lies there."""
    facts = {name: _fact(value) for name, value in _flat(to_dict(config)) if name not in _OWN}
    package = Path(__file__).parents[1]
    sources = [*package.rglob("*.py"), *package.parent.glob("bridges/**/*.py")]
    facts["the code of grpo_jax"] = _digest(path.read_bytes() for path in sorted(sources))
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            facts[f"the version of {name}"] = metadata.version(name)
    return facts


def _flat(values: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            if ".py:" in str(key):  # a class in a file, with its share
                yield f"{name}: {key}", str(key)
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple) and not all(isinstance(value, int | float) for value in values):
        for place, value in enumerate(values):
            yield from _flat(value, f"{name}[{place}]")
    else:
        yield name, values


def _fact(value: object) -> str:
    if not isinstance(value, str):
        return short_repr(value)
    file, colon, member = value.rpartition(":") if ".py:" in value else (value, "", "")
    path = Path(file)
    if len(file) > 1000 or not os.path.exists(path):
        return short_repr(value)
    named = f"{colon}{member}" if colon else ""
    return f"files{named} of digest {_digest(_contents(path))[:12]}"


def _contents(path: Path) -> Iterator[bytes]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for number, file in enumerate(files):
        size = file.stat().st_size
        name = "" if file == path else str(file.relative_to(path))
        yield f"{name} {size}".encode()
        if number < _FILES:
            with open(file, "rb") as opened:
                blocks = -(-size // _BLOCK)
                for block in range(min(blocks, _WHOLE)):
                    opened.seek(block * _BLOCK if blocks <= _WHOLE else block * (size - _BLOCK) // (_WHOLE - 1))
                    yield opened.read(_BLOCK)


def _digest(parts: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def data_facts(prompts: PromptSet) -> Facts:
    """Return the number of rows and a digest of some, by split."""
    facts = {}
    for split, rows in zip(SPLITS, prompts, strict=True):
        places = range(0, len(rows), max(1, len(rows) // _ROWS))
        digest = _digest(repr((rows[i].id, rows[i].prompt, rows[i].messages)).encode() for i in places)
        facts[f"the {split} rows of the data"] = f"{len(rows)} of digest {digest[:12]}"
    return facts


def require_shared(folder: Path) -> None:
    """Refuse a run directory that a process does not see as process 0 does."""
    if process_count() == 1:
        return
    token = folder / f".shared.{broadcast(uuid.uuid4().hex)}"
    if is_main_process():
        token.touch()
    meet()
    deadline = time.monotonic() + _SHARED_SECONDS
    while not token.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{folder}: expected one folder for all processes; what process 0 wrote there is not here")
        time.sleep(0.2)
    meet()
    if is_main_process():
        token.unlink()
