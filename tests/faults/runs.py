"""The runs that faults are tried on, each small and each with something of its own to lose; and what is equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from support.text_task import TIMINGS, final_state, make_place

STEPS = 4


class Tried(NamedTuple):
    """A run that faults are tried on.

    Attributes:
        name: Of the kind.
        config: Its file.
    """

    name: str
    config: Path


def _text(values: dict[str, Any]) -> None:
    values["training"] |= {"max_steps": STEPS, "save_every": 2, "chunk_prompts": 2}


def _lora(values: dict[str, Any]) -> None:
    _text(values)
    values["policy"] |= {"lora": {"rank": 2}}


def _ppo(values: dict[str, Any]) -> None:
    _text(values)
    values["algorithm"] = {"advantage": "gae"}
    values["ppo"] = {"kl_coef": 0.05}


_OF_TEXT: dict[str, Callable[[dict[str, Any]], None]] = {
    "text": _text, "lora": _lora, "ppo": _ppo,
}  # fmt: skip
_SMALL = {"report_to": [], "evaluation": {"prompts": 8, "validation_prompts": 4, "every": 2}}
_OTHERS: dict[str, dict[str, Any]] = {
    "recommendation": {
        "config": "recommendation_quick",
        "task": {"writes": "query"},
        "sft": {"steps": 6, "batch": 4},
        "sampling": {"max_new_tokens": 5},
        "data": {"max_prompt_tokens": 32},
        "training": {"max_steps": STEPS, "save_every": 2},
        **_SMALL,
    },
    "miniature": {
        "config": "prompt_enhancement_miniature",
        "training": {"max_steps": STEPS, "save_every": 2, "prompts_per_batch": 4, "chunk_prompts": 2},
        "sampling": {"group_size": 4},
        **_SMALL,
    },
    "cartpole": {
        "config": "cartpole_grpo",
        "num_seeds": 2,
        "report_to": [],
        "training": {"iterations": 40, "save_every": 10},
        "evaluation": {"every": 5},
    },
}
NAMES = (*_OF_TEXT, *_OTHERS)


def make_runs(folder: Path, names: tuple[str, ...] = NAMES) -> list[Tried]:
    """Writes their configs, and what they need; those that are there already are taken as they are."""
    found = []
    for name in names:
        config = folder / name / "config.yaml"
        found.append(Tried(name, config))
        if config.is_file():
            continue
        if name in _OF_TEXT:
            place = make_place(folder / name)
            values = yaml.safe_load(place.config.read_text())
            _OF_TEXT[name](values)
        else:
            (folder / name).mkdir(parents=True)
            values = _shipped(**_OTHERS[name])
        config.write_text(yaml.safe_dump(values))
    return found


def _shipped(config: str, **changes: Any) -> dict[str, Any]:
    from grpo_jax.config.command_line import find_config, read_config
    from grpo_jax.config.fields import merged

    return merged(read_config(find_config(config)), changes)


def outcome_of(run: Path) -> dict[str, Any]:
    """All that must be equal of two runs: metrics, completions, both kept checkpoints with their meta, the policy."""
    return {
        "metrics": _metrics(run / "metrics.jsonl"),
        "completions": {path.name: _table(path) for path in sorted((run / "completions").glob("*.parquet"))},
        "evaluation": json.loads((run / "summary.json").read_text())["evaluation"],
        "policy": {path.name: path.read_bytes() for path in sorted((run / "policy").glob("*.safetensors"))},
        **{which: _checkpoint(run, which) for which in ("best", "final")},
    }


def differences(came: dict[str, Any], expected: dict[str, Any]) -> str:
    """Which parts of two outcomes differ, in words; "" for none."""
    return ", ".join(name for name in expected if repr(came[name]) != repr(expected[name]))


def _metrics(path: Path) -> list[dict[str, Any]]:
    timings = (*TIMINGS, "environment_steps_per_second")
    rows = map(json.loads, path.read_text().splitlines())
    return [{name: value for name, value in row.items() if not name.startswith(timings)} for row in rows]


def _table(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pydict()


def _checkpoint(run: Path, which: str) -> Any:
    """Every array's bytes by name, and the progress without its seconds."""
    import jax

    if not (run / "checkpoints" / which).exists():
        return None
    state, progress = final_state(run, which)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): _bits(leaf) for path, leaf in leaves}, progress


def _bits(leaf: Any) -> bytes:
    import jax

    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()
