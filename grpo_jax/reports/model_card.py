"""README.md of a trained policy's folder: its training, its use, its results; without private paths."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo_jax.config.build import to_dict
from grpo_jax.config.files import Values
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.reports.page import read_summary
from grpo_jax.runs.directory import RunDirectory, write_atomically
from grpo_jax.tasks.display import Display, of_turns

_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def write_card(folder: str | Path, config: Config, run_dir: str | Path, *, checkpoint: str, adapters: bool) -> None:
    """Write README.md of an exported folder; nothing where the run has not finished."""
    summary = read_summary(RunDirectory(run_dir))
    if summary:
        card = model_card(config, summary, config.task.display, checkpoint=checkpoint, adapters=adapters)
        write_atomically(Path(folder) / "README.md", card)


def model_card(
    config: Config,
    summary: Values,
    display: Display = Display(),
    *,
    checkpoint: str = "final",
    adapters: bool = False,
) -> str:
    """Return the card of a language run in Markdown, with the front matter that the Hugging Face hub reads.

    The weights are those of `checkpoint`, or with `adapters` the adapters alone, in PEFT's format.
    """
    import yaml

    plain = to_dict(config)
    base, task = config.policy.path, _public(plain["task"]["kind"])
    algorithm = config.algorithm
    tags = ["grpo_jax", "reinforcement-learning", algorithm.advantage, algorithm.preset]
    front: dict[str, object] = {
        "library_name": "peft" if adapters else "transformers",
        "tags": list(dict.fromkeys(tags)),
    }
    if _is_hub_id(base):
        front["base_model"] = base
    merged = "to load onto it" if adapters else "merged into it"
    adapted = f", LoRA of rank {config.policy.lora.rank} {merged}" if config.policy.lora.used else ""
    facts = {
        "Task": task,
        "Base policy": f"{base if _is_hub_id(base) else _public(base)}{adapted}",
        "Prompts": _public(config.data.prompts or "the task's own"),
        "Rewards": _rewards(config),
        "Judges": ", ".join(f"{name}: {_public(judge['kind'])}" for name, judge in plain["judges"].items()) or "none",
        "Advantages and loss": f"{algorithm.advantage}, {algorithm.preset}",
        "Iterations": f"{summary['iterations']} of {config.training.prompts_per_batch} prompts with "
        f"{config.sampling.group_size} completions each",
        **({} if checkpoint == "final" else {"Checkpoint": f"{checkpoint}; the measures are of the final one"}),
        "Seed": str(summary.get("seed", config.seed)),
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# A policy trained with grpo_jax: {task}",
        "\n".join(f"- **{name}**: {_cell(value)}" for name, value in facts.items()),
        f"## Measures\n\n{_measures(summary, display)}",
        f"## Versions\n\n{_table(('package', 'version'), summary.get('versions', {}).items())}",
    ]
    return "\n\n".join(parts) + "\n"


def _rewards(config: Config) -> str:
    def reward_text(reward: RewardSection) -> str:
        text = f"{reward.called} (weight {reward.weight:g})"
        waits = reward.condition_on not in (None, "none")
        return f"{text}, where {reward.condition_on} ≥ {reward.threshold:g}" if waits else text

    return ", ".join(map(reward_text, config.rewards)) or "the task's own"


def _measures(summary: Values, display: Display) -> str:
    evaluation = summary.get("evaluation", {})
    if not evaluation:
        return "No prompts were held out: nothing was measured before and after training."

    def value(name: str, number: float | None) -> str:
        finite = number is not None and math.isfinite(number)
        return f"{number:.{display.digits_of(name)}f}" if finite else "–"

    rows = [
        (name, *(value(name, values.get(when)) for when in ("before", "after")))
        for name, values in evaluation.items()
        if not of_turns(name, evaluation)
    ]
    about = f"Of {summary['prompts']} held-out prompts, greedy, before and after training; `total` is maximised."
    return f"{about}\n\n{_table(('measure', 'before', 'after'), rows)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(str(cell)) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _is_hub_id(name: str) -> bool:
    return bool(_HUB.fullmatch(name)) and not name.startswith(".") and not Path(name).exists()


def _public(name: str) -> str:
    """Return a name without its folders: the end of a path, of "file.py:Name" too; others as they are."""
    return re.sub(r".*[/\\](?=[^/\\])", "", name)
