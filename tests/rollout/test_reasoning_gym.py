"""Rows and scores of reasoning-gym's own data sets, and a run on them through the command."""

import inspect
import json
import os
import re
import subprocess
import sys
import warnings

import pytest
from support.text_task import train_here, train_values
from support.tiny_models import causal_lm

from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.rewards import reasoning_gym
from grpo_jax.rollout import reasoning_gym as tasks
from grpo_jax.rollout.prompts import prompts_of
from grpo_jax.rollout.reasoning_gym import read_tasks, score_answer

with warnings.catch_warnings(action="ignore"):
    gym = pytest.importorskip("reasoning_gym", reason="needs grpo_jax[environments]")
    from reasoning_gym.factory import DATASETS

SUMS = "chain_sum?min_terms=2&max_terms=3&size=50"


def prompts(place: str, seed: int = 0, **data):
    return prompts_of(make_config(task="text", seed=seed, data={"prompts": place, **data}))


def texts(rows):
    return [row.prompt for row in rows]


def test_rows_are_those_of_the_data_sets_with_their_difficulty():
    found = prompts(f"reasoning_gym:{SUMS}+letter_counting?size=20", held_out=0.2)
    assert [len(part) for part in found] == [70, 14, 14]
    assert {row.columns["dataset"] for row in found.test} == {SUMS, "letter_counting?size=20"}
    assert {row.columns["dataset"] for row in found.test[:2]} == {row.columns["dataset"] for row in found.test}
    sums = [row for part in found for row in part if row.columns["dataset"] == SUMS]
    for row in sums:
        expression = row.prompt.rpartition(": ")[2].removesuffix(" =")
        assert row.columns["answer"] == str(eval(expression))
        terms, digits = re.fullmatch(r"num_terms (\d), num_digits (\d)", row.columns["difficulty"]).groups()
        numbers = re.findall(r"\d+", expression)
        assert (len(numbers), len(numbers[0])) == (int(terms), int(digits))
    assert len({row.columns["difficulty"] for row in sums}) > 4


def test_held_out_rows_are_the_same_for_each_seed_and_never_trained_on():
    """With 180 possible prompts, chance alone would train on held-out ones."""
    place = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&max_digits=1&size=150"
    one, other = (prompts(place, seed, held_out=0.1) for seed in (0, 1))
    for split in ("validation", "test"):
        assert texts(getattr(one, split)) == texts(getattr(other, split))
        assert len({*texts(getattr(one, split))}) == 15
    held_out = {*texts(one.validation), *texts(one.test)}
    assert len(held_out) == 30 and held_out.isdisjoint([*texts(one.train), *texts(other.train)])
    assert 100 < len(one.train) < 150  # some were drawn and left out


def test_neighbouring_seeds_share_no_rows():
    """Upstream's entry n of seed s is entry n - 1 of seed s + 1."""
    upstream = [gym.create_dataset("chain_sum", size=50, seed=seed, min_digits=4) for seed in (0, 1)]
    assert upstream[0][1]["question"] == upstream[1][0]["question"]
    trained = [texts(prompts("reasoning_gym:chain_sum?min_digits=4&size=50", seed).train) for seed in (0, 1)]
    assert {*trained[0]}.isdisjoint(trained[1]) and len({*trained[0]}) == 50


def test_a_test_file_may_be_harder_tasks():
    hard = "reasoning_gym:chain_sum?min_terms=5&max_terms=5&size=8"
    found = prompts(f"reasoning_gym:{SUMS}", test=hard)
    assert [len(part) for part in found] == [50, 0, 8] and {row.prompt.count(" =") for row in found.test} == {1}
    assert {row.columns["metadata"]["num_terms"] for row in found.test} == {5}
    assert texts(found.test) == texts(prompts(f"reasoning_gym:{SUMS}", 7, test=hard).test)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("chain_su", "no such data set; did you mean chain_sum, decimal_chain_sum?"),
        ("", "no such data set; did you mean ab, acre"),
        ("chain_sum?min_term=3", "'min_term=3': write OPTION=VALUE of min_terms, max_terms"),
        ("chain_sum?size", "'size': write OPTION=VALUE of"),
        ("chain_sum?seed=3", "the run's seed draws the rows"),
        ("chain_sum?min_terms=8&max_terms=2", "max_terms must be >= min_terms"),
        ("chain_sum?max_terms=[", "not valid YAML"),
        ("chain_sum?size=two", "TypeError"),
        ("chain_sum?max_terms=2&max_digits=1", "are too few to keep 100 for testing and 100 for validation"),
        ("composite", "name its data sets, joined by +"),
        ("simple_integration", "runs the policy's text as Python"),
        ("word_ladder", "set the variable PYTHONHASHSEED=0"),
    ],
)
def test_mistakes_are_named(place, message, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        read_tasks(f"reasoning_gym:{place}", 0, 0.2)
    assert str(raised.value).startswith("reasoning_gym:") and "\n" not in str(raised.value)


def test_options_may_hold_a_plus():
    place = 'reasoning_gym:basic_arithmetic?operators=["+"]&size=5+basic_arithmetic?operators=["-"]&size=5'
    first, second = prompts(place, held_out=0).train[:5], prompts(place, held_out=0).train[5:]
    assert all("+" in row.prompt and " - " not in row.prompt for row in first)
    assert all(" - " in row.prompt and "+" not in row.prompt for row in second)


def test_a_missing_package_names_its_extra(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    tasks._dataset.cache_clear()
    policy = causal_lm(tmp_path / "policy", num_hidden_layers=1)
    train_values(
        {"task": "text", "policy": {"path": str(policy)}, "data": {"prompts": "reasoning_gym:gcd"}},
        tmp_path / "run",
        "--rewards",
        "grpo_jax.rewards:reasoning_gym",
        expected=2,
    )
    assert 'pip install "grpo_jax[environments]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("23", 1.0),
        ("<think>99</think> 23", 1.0),
        ("First 5.\n#### 23", 1.0),
        (r"so \boxed{7}, no, \boxed{23}", 1.0),
        ("<answer>7</answer> <answer> 23 </answer> #### 7", 1.0),
        (r"\boxed{23} #### 7", 1.0),
        ("#### 24", 0.0),
        ("", 0.0),
        ([{"role": "assistant", "content": "<answer>23</answer>"}], 1.0),
    ],
)
def test_an_answer_is_read_from_its_mark(completion, value):
    entry = {"answer": ["23"], "metadata": [{"source_dataset": "chain_sum"}], "dataset": [SUMS]}
    assert reasoning_gym(["?"], [completion], **entry) == [value]


def test_rows_from_elsewhere_have_no_reward():
    columns = {"answer": ["2", "2"], "metadata": [None, {}], "dataset": [None, "gcd"]}
    assert reasoning_gym(["?"] * 2, ["2", "2"], **columns) == [None, 1.0]


def test_a_column_dataset_that_names_no_data_set_is_an_error_and_no_score():
    for name, wrong in (("gsm8k", "no such data set"), ("gcd?range=3", "no such option"), ("composite", "not here")):
        with pytest.raises(UserError, match=wrong):
            reasoning_gym(["?"], ["2"], answer=["2"], metadata=[{}], dataset=[name])


@pytest.mark.parametrize(("name", "text"), [("prime_factorization", "junk"), ("game_of_life", "{}"), ("boxnet", "0")])
def test_texts_that_a_score_cannot_read_score_nothing(name, text):
    data = gym.create_dataset(name, size=1, seed=3)
    with pytest.raises((ValueError, KeyError, TypeError)):  # upstream's
        data.score_answer(text, data[0])
    assert score_answer(text, name, data[0]) == 0.0


def test_halting_is_judged_by_the_word():
    """Upstream compares bool(text), which is true for "False"."""
    data = gym.create_dataset("game_of_life_halting", size=20, seed=3)
    answers = {entry["answer"]: entry for entry in data}
    assert answers.keys() == {"True", "False"}
    for right, entry in answers.items():
        found = [score_answer(text, "game_of_life_halting", entry) for text in ("True", "False", "junk")]
        assert found == [float(right == "True"), float(right == "False"), 0.0]


EVALUATED = {*tasks._READABLE} | {name for name, why in tasks._REFUSED.items() if "sympy" in why}


def test_every_score_that_runs_text_as_python_is_known():
    found = set()
    for name, (kind, _) in DATASETS.items():
        source = inspect.getsource(kind.score_answer)
        if re.search(r"\beval\(|\bexec\(|\bsympify\(", source) or ("parse_expr(" in source and "logic" not in name):
            found.add(name)
    assert found - {"number_sorting"} == EVALUATED  # which evaluates its own answer
    assert "eval(entry" in inspect.getsource(DATASETS["number_sorting"][0].score_answer)


@pytest.mark.parametrize("name", sorted(tasks._READABLE))
def test_no_answer_runs_as_python(name, tmp_path):
    data, mark = gym.create_dataset(name, size=5, seed=1), tmp_path / "ran"
    for text in (f"open('{mark}', 'w')", f'[open("{mark}", "w") for one in "a"]', "9**9**9**9", "[0 for a in 'b']"):
        assert score_answer(text, name, data[0]) == 0.0
        assert not mark.exists()
    for entry in data:
        assert score_answer(entry["answer"], name, entry) == 1.0
    if name in ("binary_matrix", "spiral_matrix"):  # upstream's part of a score for a list
        rows = [line.split() for line in data[0]["answer"].split("\n")]
        assert score_answer(str(rows if name == "binary_matrix" else rows[0]), name, data[0]) in (0.1, 0.0)


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore")  # upstream's, which would become errors and then scores of 0
def test_all_data_sets_score_their_own_answers_and_no_junk(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for name in sorted(DATASETS.keys() - tasks._REFUSED.keys()):
        for record in [row for _, row in read_tasks(f"reasoning_gym:{name}?size=3", 1, 0).all()]:
            entry = {"answer": record["answer"], "metadata": record["metadata"]}
            if record["answer"] is not None:
                assert score_answer(record["answer"].strip(), name, entry) == 1.0, name
            for text in ("", "junk", "{}", "[]", "I do not know."):
                assert score_answer(text, name, entry) < 0.3 or text == record["answer"], (name, text)


@pytest.mark.wide
def test_the_data_sets_that_hashing_changes_are_known():
    code = (
        "import json, warnings; warnings.simplefilter('ignore')\nimport reasoning_gym as gym\n"
        "from reasoning_gym.factory import DATASETS\n"
        "for name in sorted({*DATASETS} - {'composite'}):\n"
        "    data = gym.create_dataset(name, size=4, seed=12345)\n"
        "    print(name, json.dumps([data[n] for n in range(4)], default=repr))\n"
    )
    lines = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout.splitlines()
        for seed in ("1", "7")
    ]
    lines = [[line.lstrip(".") for line in part if " " in line] for part in lines]
    assert len(lines[0]) == len(DATASETS) - 1
    changed = {one.partition(" ")[0] for one, other in zip(*lines, strict=True) if one != other}
    assert changed - tasks._REFUSED.keys() == {*tasks._HASHED}


@pytest.mark.slow
def test_a_run_trains_measures_by_difficulty_and_resumes(tmp_path):
    policy = causal_lm(tmp_path / "policy", num_hidden_layers=1)
    values = {
        "task": "text",
        "report_to": [],
        "policy": {"path": str(policy), "remat": "none"},
        "data": {"prompts": "reasoning_gym:gcd?size=20+count_bits?size=20&max_n=8", "held_out": 0.1},
        "sampling": {"group_size": 2, "max_new_tokens": 4},
        "training": {"prompts_per_batch": 4, "max_steps": 2, "save_every": 1},
        "evaluation": {"every": 0, "samples": 0, "by": "dataset"},
        "rewards": [{"name": "grpo_jax.rewards:reasoning_gym"}],
        "eval_rewards": ["grpo_jax.rewards:reasoning_gym"],
    }
    run = tmp_path / "run"
    train_values(values, run)
    measures = json.loads((run / "summary.json").read_text())["evaluation"]
    assert {"reasoning_gym/gcd?size=20", "reasoning_gym/count_bits?size=20&max_n=8"} <= measures.keys()
    assert train_here(run / "config.yaml", run, "--resume", "--training.max_steps", "3") == 0
    assert "changed" not in (run / "train.log").read_text()
