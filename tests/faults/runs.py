"""The runs that faults are tried on, all small and with different state, and their comparison."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from support.text_task import final_state, make_place, rows

STEPS = 4


class Tried(NamedTuple):
    """A run that faults are tried on.

    Attributes:
        name: Of the kind.
        config: Its file.
    """

    name: str
    config: Path


_SHORT = {"max_steps": STEPS, "save_every": 2, "chunk_prompts": 2}
_OF_TEXT: dict[str, dict[str, Any]] = {
    "text": {},
    "lora": {"policy": {"lora": {"rank": 2}}},
    "ppo": {"algorithm": {"advantage": "gae", "kl_coef": 0, "update_ref_every": 0}, "ppo": {"kl_coef": 0.05}},
}
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
    "renderer": {
        "config": "prompt_enhancement_scenes",
        "training": {"max_steps": STEPS, "save_every": 2, "prompts_per_batch": 4, "chunk_prompts": 2},
        "sampling": {"group_size": 4},
        "judges": {"renderer": {"train": {"learning_rate": 2.0e-3}, "steps": 2, "eval_steps": 2}},
        **_SMALL,
    },
    "miniature": {
        "config": "prompt_enhancement_miniature",
        "training": {"max_steps": STEPS, "save_every": 2, "prompts_per_batch": 4, "chunk_prompts": 2},
        "sampling": {"group_size": 4},
        **_SMALL,
    },
}
NAMES = (*_OF_TEXT, *_OTHERS)


def make_runs(folder: Path, names: tuple[str, ...] = NAMES) -> list[Tried]:
    """Writes their configs, and what they need; those that are there already are taken as they are."""
    from grpo_jax.config.command_line import find_config, read_config
    from grpo_jax.config.fields import merged

    found = []
    for name in names:
        config = folder / name / "config.yaml"
        found.append(Tried(name, config))
        if config.is_file():
            continue
        if name in _OF_TEXT:
            place = make_place(folder / name)
            values = merged(yaml.safe_load(place.config.read_text()), {"training": _SHORT} | _OF_TEXT[name])
        else:
            (folder / name).mkdir(parents=True)
            changes = dict(_OTHERS[name])
            values = merged(read_config(find_config(changes.pop("config"))), changes)
        config.write_text(yaml.safe_dump(values))
    return found


def outcome_of(run: Path) -> dict[str, Any]:
    """All that must be equal of two runs: metrics, completions, both kept checkpoints with their meta, the policy."""
    return {
        "metrics": rows(run),
        "completions": {path.name: _table(path) for path in sorted((run / "completions").glob("*.parquet"))},
        "evaluation": json.loads((run / "summary.json").read_text())["evaluation"],
        "policy": {path.name: path.read_bytes() for path in sorted((run / "policy").glob("*.safetensors"))},
        **{which: _checkpoint(run, which) for which in ("best", "final")},
    }


def differences(came: dict[str, Any], expected: dict[str, Any]) -> str:
    """Which parts of two outcomes differ, in words; "" for none."""
    return ", ".join(name for name in expected if repr(came[name]) != repr(expected[name]))


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
