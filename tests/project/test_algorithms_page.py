"""The code of docs/algorithms.md runs with the printed output, and its names exist."""

import contextlib
import io
import math
import re
from pathlib import Path

import pytest

from grpo_jax.config.sections import AlgorithmSection, PPOSection
from grpo_jax.core import advantages, aggregation, flow, kl, losses, ppo, returns, selection, surrogates

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def promised(block):
    """What the block says it prints: comments behind a print or show, and comment lines of numbers."""
    lines = block.splitlines()
    behind = [re.search(r"(?:print|show)\(.*\)  # (.*)$", line) for line in lines]
    below = [re.match(r"# ([\[\d].*)$", line) for line in lines]
    return [found.group(1) for pair in zip(behind, below, strict=True) for found in pair if found]


@pytest.mark.wide  # its functions have tests of their own
def test_code_prints_what_it_says():
    namespace = {}
    assert len(BLOCKS) >= 8
    for block in BLOCKS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "algorithms.md", "exec"), namespace)
        assert printed.getvalue().splitlines() == promised(block), block


@pytest.mark.parametrize(("prefix", "section"), [("algorithm", AlgorithmSection), ("ppo", PPOSection)])
def test_config_fields_are_real_and_all_there(prefix, section):
    fields = set(section.model_fields)
    named = set(re.findall(rf"`{prefix}\.(\w+)", PAGE))
    assert named <= fields
    undescribed = {name for name in fields if f"`{prefix}.{name}" not in PAGE and f"`{name}" not in PAGE}
    assert not undescribed


def test_functions_are_real():
    modules = (advantages, aggregation, flow, kl, losses, ppo, returns, selection, surrogates)
    for name in set(re.findall(r"`(\w+)\(", PAGE)):
        assert any(hasattr(module, name) for module in modules), name


@pytest.mark.parametrize("name", losses.PRESETS)
def test_presets_are_as_described(name):
    """The table's surrogate, ratio, and scale of advantages."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    _, _, surrogate, ratio, _, scale, *_ = (cell.strip() for cell in row.split("|"))
    described = eval(surrogate.strip("`"), vars(surrogates) | vars(math))
    assert described == losses.PRESETS[name]["surrogate"]
    levels = {"token": "token", "row": "sequence", "row, of clipped tokens": "geometric", "row, product": "product"}
    assert levels[ratio] == losses.PRESETS[name]["ratio"]
    assert scale == losses.PRESET_SCALES[name]


@pytest.mark.parametrize("name", advantages.SUM_ESTIMATORS)
def test_estimators_are_choices_with_a_row(name):
    assert AlgorithmSection(advantage=name).advantage == name
    function = advantages.SUM_ESTIMATORS[name].__name__
    assert any(f"| `{function}` | `{name}` |" in line for line in PAGE.splitlines())
