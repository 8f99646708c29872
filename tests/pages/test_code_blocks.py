"""The Python of the pages runs, one block after the other, with the files that a page names."""

import json
import math
import re
import shutil

import jax.numpy as jnp
import pytest
from support.imports import ROOT
from support.tiny_models import causal_lm

from bridges import bundled
from grpo_jax import train
from grpo_jax.config import run as config
from grpo_jax.core.losses import grpo_loss
from grpo_jax.rollout.env import Episode, Turn

ELSEWHERE = {
    "docs/algorithms.md": "tests/project/test_algorithms_page.py",
    "docs/judges.md": "tests/judges/test_clip_model.py",
}
"""Pages whose blocks another test runs, with what they print or make."""
WHOLE = ("tutorial", "recipes")
"""Folders of docs/ whose pages other tests run whole, with their files, commands and what they print."""
SMALL = {
    "sampling": {"group_size": 2, "max_new_tokens": 4},
    "training": {"max_steps": 1, "prompts_per_batch": 2},
    "evaluation": {"samples": 0},
}
WIDE = ("docs/runs.md", "docs/coming_from_trl.md", "docs/turns.md")
"""Pages whose calls the tests of runs and of the page itself make too."""
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's
NAME = "path/to/Qwen2.5-0.5B-Instruct"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


WITH_PYTHON = [
    page
    for page in (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
    if blocks(page) and page not in ELSEWHERE and page.split("/")[1] not in WHOLE
]


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """What pages name: a policy, the README's reward and prompts, adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("things")
    model = causal_lm(folder / NAME, num_hidden_layers=1)
    shutil.copytree(model, folder / "Qwen" / "Qwen2.5-0.5B-Instruct")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["q_proj"]))
    for adapter in ("runs/my_run/adapter", "sums", "rewrites"):
        adapted.save_pretrained(folder / adapter)
    (folder / "my_rewards.py").write_text(blocks("README.md")[0])
    rows = [{"prompt": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(11, 17) for b in range(3, 6)]
    for name in ("sums.jsonl", "questions.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def desk(things, tmp_path, monkeypatch):
    """A folder with these things, in which runs are small."""
    shutil.copytree(things, tmp_path, dirs_exist_ok=True)
    whole = config.make_config

    def make_config(values=None, **sections):
        return whole(config.merged(config.merged(values or {}, sections), SMALL))

    monkeypatch.setattr(config, "make_config", make_config)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scope_of(page: str, *, having: str = "") -> dict:
    """Return the names of a page's blocks after they ran, those with a text in them."""
    scope: dict = {"__name__": "__main__"}
    for block in filter(lambda block: having in block, blocks(page)):
        exec(compile(block, page, "exec"), scope)
    return scope


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.wide] * (page in WIDE)) for page in WITH_PYTHON]
)
def test_python_of_a_page_runs(page, desk, monkeypatch):
    monkeypatch.setitem(SMALL, "data", {"held_out": 0})
    scope = scope_of(page)
    if "config" in scope:
        assert json.loads((desk / scope["config"].run_dir / "summary.json").read_text())["iterations"] == 1


def test_a_tool_is_answered_and_judged():
    scope = scope_of("docs/turns.md", having="def right")
    asks, ends = (Episode((Turn(text, text),)) for text in ("<sum>1 2 39</sum>", "It is 42."))
    assert scope["step"]([{}, {}], [asks, ends]) == ["42", None]
    assert scope["right"](["?"] * 2, ["It is 42.", "41"], ["42", "42"], [asks, ends]) == [1.0, 0.0]


@pytest.mark.slow
def test_the_python_of_the_readme_trains_and_answers(desk, monkeypatch, capsys):
    _, trains, answers = blocks("README.md")[:3]
    answers = answers.replace('answer("What', 'print("said:", answer("What').replace('number.")', 'number."))')
    monkeypatch.syspath_prepend(str(desk))
    exec(compile(trains + answers, "README.md", "exec"), {"__name__": "__main__"})
    summary = json.loads((desk / "runs" / "sums" / "summary.json").read_text())
    assert summary["iterations"] == 1 and set(summary["evaluation"]) >= {"correct", "total"}
    assert "said: " in capsys.readouterr().out


def test_rewards_of_the_pages_tell_right_from_wrong():
    animal = scope_of("docs/pictures.md", having="def names_the_animal")["names_the_animal"]
    assert animal(["?"] * 2, ["a cat", "a dog"], [None, None], ["cat", "cat"]) == [1.0, 0.0]
    brand = scope_of("docs/recommendation.md", having="def brand")["brand"]
    assert brand(["alder red lamp", "birch red lamp"], ["alder blue chair"] * 2) == [1.0, 0.0]
    scope: dict = {}
    exec(blocks("README.md")[0], scope)
    assert scope["correct"](["?"] * 3, ["It is 48.", "48 or 52", "no idea"], ["48"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.wide
def test_the_examples_of_contributing_work(tmp_path, monkeypatch):
    """A task and a judge train by their files; the architecture reads a config; the loss takes the surrogate."""
    task, judge, architecture, surrogate = blocks("CONTRIBUTING.md")
    (tmp_path / "my_task.py").write_text(task)
    (tmp_path / "calm.py").write_text(judge)
    monkeypatch.chdir(tmp_path)
    words = "--task my_task.py:Numbers --policy.path miniature --judges.calm calm.py:Calm --rewards short,calm"
    small = "--sampling.group_size 2 --sampling.max_new_tokens 4 --training.prompts_per_batch 2 --training.max_steps 1"
    assert train.main([*words.split(), *small.split(), "--run_dir=run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["iterations"] == 1 and {"short", "calm"} <= set(summary["evaluation"])

    scope: dict = {}
    exec(architecture, scope)
    fields = json.loads((bundled("miniature", "policy") / "config.json").read_text()) | {"model_type": "mine"}
    assert scope["MINE_ARCHITECTURE"].read(fields).qkv_bias
    exec(surrogate, scope)
    logprobs = jnp.array([[-1.0, -2.0]])
    loss, _ = grpo_loss(
        logprobs, logprobs - 0.5, jnp.array([2.0]), jnp.ones((1, 2), bool), surrogate=scope["Unclipped"]()
    )
    assert loss == pytest.approx(-2 * math.exp(0.5), rel=1e-6)
