"""The README's own task, run as it stands there: its Python, its files, its command lines."""

import json
import re
from pathlib import Path

import pytest
from support.tiny_models import causal_lm

from grpo_jax.config import run as config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OWN = README[README.index("## Your own task") : README.index("## Build on it")]
BLOCKS = re.findall(r"```python\n(.*?)```", OWN, flags=re.S)
QUICKLY = {"evaluation": {"samples": 0}, "policy": {"remat": "none"}, "report_to": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader would stand: the README's policy path, reward file and prompt file."""
    here = tmp_path_factory.mktemp("reader")
    causal_lm(here / "path" / "to" / "Qwen2.5-0.5B-Instruct")
    (here / "my_rewards.py").write_text(BLOCKS[0])
    rows = [
        {"prompt": f"What is {a} times {b}? Answer with the number.", "answer": str(a * b)}
        for a in range(11, 19)
        for b in range(3, 7)
    ]
    (here / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return here


@pytest.mark.slow
def test_the_python_of_the_readme_trains_and_answers(folder, monkeypatch, capsys):
    answered = BLOCKS[2].replace('answer("What', 'print("said:", answer("What').replace('number.")', 'number."))')
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    make_config = config.make_config
    monkeypatch.setattr(config, "make_config", lambda **sections: make_config(QUICKLY, **sections))
    exec(compile(BLOCKS[1] + answered, "README.md", "exec"), {"__name__": "__main__"})
    summary = json.loads((folder / "runs" / "sums" / "summary.json").read_text())
    assert summary["iterations"] == 5 and set(summary["evaluation"]) >= {"correct", "total"}
    assert "said: " in capsys.readouterr().out


def test_the_rewards_of_the_readme_know_right_from_wrong():
    scope: dict = {}
    exec(BLOCKS[0], scope)
    texts = ["It is 48.", "48 or 52", "no idea"]
    assert scope["correct"](["?"] * 3, texts, ["48"] * 3) == [1.0, 0.0, 0.0]
