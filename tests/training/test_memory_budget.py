"""The number of micro-batches that a memory budget asks for."""

from types import SimpleNamespace

import numpy as np
import pytest
from support import tiny_update

from grpo_jax.config import Config, SamplingSection, TrainingSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import PromptSet, Row
from grpo_jax.runs import parts as parts_module
from grpo_jax.runs.parts import RunContext, within_budget
from grpo_jax.tasks.task import TaskData
from grpo_jax.tasks.text_task import Text
from grpo_jax.training.memory import fewest_parts

PROMPTS, LENGTH = 8, 16


@pytest.mark.parametrize(
    ("budget", "least", "expected", "measured"),
    [
        (200, 1, (1, 130), [1]),
        (60, 1, (3, 60), [1, 3]),
        (59, 1, (4, 55), [1, 3, 4]),
        (60, 4, (4, 55), [4]),
        (5, 1, (12, 38), [1, 12]),
    ],
    ids=["fits", "exactly", "more", "at least", "never"],
)
def test_the_fewest_parts_that_fit_with_few_measurements(budget, least, expected, measured):
    """30 bytes stay however small the parts, 100 are shared out: 1, 2, 3, 4, 6, 12 parts take 130 ... 38."""
    asked = []

    def measure(count):
        asked.append(count)
        return 30 + 100 // count - (3 if count == 3 else 0)

    got = fewest_parts(measure, 12, budget=budget, least=least)
    assert (got, asked) == (expected, measured)


def made(**training) -> tuple[RunContext, list]:
    """Parts of a run on the tiny decoder, as far as a budget looks at them."""
    config = Config(
        task=Text(),
        training=TrainingSection(prompts_per_batch=PROMPTS, **training),
        sampling=SamplingSection(group_size=4, max_new_tokens=12),
    )
    parts = dict.fromkeys(RunContext._fields) | {
        "config": config,
        "policy": SimpleNamespace(config=tiny_update.CONFIG, mesh=None),
        "task_data": TaskData(PromptSet((Row(1, "a"),), (), ())),
        "environment": SimpleNamespace(
            encode=lambda rows: SimpleNamespace(tokens=np.zeros((len(rows), LENGTH)), pictures=None)
        ),
    }
    return RunContext(**parts)


def test_accumulation_is_what_the_budget_asks_for(monkeypatch):
    """Measured are updates at the longest prompt's length, with as many micro-batches as are tried."""
    measured = []

    def update_bytes(config, *_):
        measured.append((config.training.accumulation, config.data.max_prompt_tokens))
        return 2**30 // config.training.accumulation

    monkeypatch.setattr(parts_module, "update_bytes", update_bytes)
    lines = []
    parts = within_budget(made(memory_budget_gib=0.5), lambda *line: lines.append(line))
    assert parts.config.training.accumulation == 2 and measured == [(1, LENGTH), (2, LENGTH)]
    assert lines[0][0] == "update" and lines[0][1].startswith("2 micro-batches of 4 prompts: 0.50 GiB")


def test_a_budget_that_nothing_fits_is_refused(monkeypatch):
    monkeypatch.setattr(parts_module, "update_bytes", lambda *arguments: 2**20)
    with pytest.raises(UserError, match=r"memory_budget_gib = 1e-06.* with 1 of its prompts at a time"):
        within_budget(made(memory_budget_gib=1e-6), lambda *_: None)


def test_without_a_budget_nothing_is_compiled():
    parts = made(accumulation=4)
    assert within_budget(parts, None) is parts
