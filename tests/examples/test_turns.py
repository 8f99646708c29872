"""Tools and games in turns through the command: calls of a calculator, guesses of a number.

The game is wide: tests/turns has runs of episodes, tests/runs/test_measures.py what is measured of turns.
"""

import json
import math

import numpy as np
import pytest
from support.imports import ROOT
from support.text_task import SMALL_EXAMPLE, episodes_of, rows

from grpo_jax.config.command_line import load_config
from grpo_jax.runs.loading import load
from grpo_jax.runs.policy import run_config
from grpo_jax.runs.sft import supervised_batch
from grpo_jax.train import main

CALCULATOR, GUESS = (ROOT / "examples" / name / "task.py" for name in ("calculator", "guess_the_number"))
FEW = {"evaluation.prompts": 4, "evaluation.validation_prompts": 4, "sft.steps": 120, "training.max_steps": 2}
SMALL = SMALL_EXAMPLE | FEW
GUESSES = {"evaluation.every": 1, "sft.steps": 30}


def command(task, run, **changes):
    return ["--task", task, *(f"--{name}={value}" for name, value in {**SMALL, "run_dir": run, **changes}.items())]


@pytest.fixture(scope="module")
def calculated(tmp_path_factory):
    run = tmp_path_factory.mktemp("calculator") / "run"
    assert main(command(f"{CALCULATOR}:Calculator", run)) == 0
    return run


@pytest.fixture(scope="module")
def guessed(tmp_path_factory):
    run = tmp_path_factory.mktemp("guess") / "run"
    assert main(command(f"{GUESS}:GuessTheNumber", run, **GUESSES)) == 0
    return run


def episodes(run, step):
    found = episodes_of(run)[16 * (step - 1) : 16 * step]
    assert [turns[0]["episode"] for turns in found] == list(range(16))
    assert all([turn["turn"] for turn in turns] == list(range(1, len(turns) + 1)) for turns in found)
    return found


def test_the_calculator_is_asked_and_answers(calculated):
    """Every table row by Python's own arithmetic; some ask, some guess at once."""
    asked = 0
    for step in (1, 2):
        for turns in episodes(calculated, step):
            first, last = turns[0], turns[-1]
            words = first["completion"].split()
            called = len(words) == 4 and words[0] == "call" and words[2] in ("plus", "minus")
            assert len(turns) == 1 + called
            if called:
                expression = first["completion"].removeprefix("call ").replace("plus", "+").replace("minus", "-")
                assert first["observation"] == str(eval(expression)) and first["reward/right"] == 0
            assert last["observation"] is None
            expected = eval(last["prompt"].replace("plus", "+").replace("minus", "-"))
            assert last["reward/right"] == float(last["completion"] == str(expected))
            assert [turn["eval_rewards/asked"] for turn in turns] == [
                first["completion"] == f"call {first['prompt']}"
            ] * len(turns)
            assert len({turn["advantage"] for turn in turns}) == 1  # the end weighs all turns alike
            asked += called
    assert 0 < asked < 32


def test_a_lesson_is_an_episode_as_it_is_sampled(calculated):
    """The teacher's texts are learned with their ends, the tool's answer is read."""
    ctx = load(run_config(calculated), lambda *_: None)
    lesson = next(pair for pair in ctx.task_data.pairs() if len(pair) == 4)
    batch = supervised_batch(ctx, ctx.policy.variables, [lesson, lesson[:2]])
    words = ctx.policy.tokenizer.convert_ids_to_tokens
    present, mask = batch.present[0, 0], batch.mask[0, 0]
    first, answer, second = lesson[1].split(), lesson[2], lesson[3]
    expected = [*first, "<|end|>"][:5]
    cut_off = ["<|end|>"] if len(first) > 4 else []
    assert words(batch.tokens[0, 0][present]) == [*expected, *cut_off, answer, "<|next|>", second, "<|end|>"]
    assert words(batch.tokens[0, 0][mask]) == [*expected, second, "<|end|>"]
    assert batch.mask[1].sum() == batch.present[1].sum() == len(expected)
    assert batch.tokens.shape == (2, 1, 14)


def test_metrics_tell_of_turns(calculated):
    (row, _), table = rows(calculated), episodes(calculated, 1)
    for turn in (1, 2):
        values = [turns[turn - 1]["reward/right"] for turns in table if len(turns) >= turn]
        assert row[f"reward/right@turn{turn}"] == pytest.approx(np.mean(values))
        lengths = [turns[turn - 1]["length"] for turns in table if len(turns) >= turn]
        assert row[f"completion_tokens@turn{turn}"] == pytest.approx(np.mean(lengths))
    assert row["reward/right/mean"] == pytest.approx(np.mean([turns[-1]["reward/right"] for turns in table]))
    assert row["turns"] == pytest.approx(np.mean([len(turns) for turns in table]))
    assert row["completion_tokens"] == pytest.approx(np.mean([sum(t["length"] for t in turns) for turns in table]))
    # An answer is the number and the mark behind it, after an end mark where the call was cut off.
    said = [2 + turns[0]["truncated"] if len(turns) > 1 else 0 for turns in table]
    assert row["observation_tokens"] == pytest.approx(np.mean(said))
    assert {"seconds/env", "seconds/sample", "seconds/score"} <= json.loads(
        (calculated / "metrics.jsonl").read_text().splitlines()[0]
    ).keys()


@pytest.mark.wide
def test_held_out_measures_and_report_tell_of_turns(guessed):
    summary = json.loads((guessed / "summary.json").read_text())["evaluation"]
    names = {"found", *(f"found_{what}" for what in ("turn_1", "turn_2", "peak", "kept", "gain"))}
    assert names <= summary.keys()
    after = {name: summary[name]["after"] for name in names}
    shown = json.loads((guessed / "report.json").read_text())["episodes"]
    scores = [[turn["scores"]["found"] for turn in entry["turns"]] for entry in shown]
    assert len(scores) == 4 and shown[0]["turns"][0]["observation"] in ("higher", "lower", None)
    by_turn = [[one[min(turn, len(one) - 1)] for one in scores] for turn in range(3)]
    assert [after["found_turn_1"], after["found_turn_2"], after["found"]] == [np.mean(one) for one in by_turn]
    assert after["found_peak"] == after["found"] and after["found_gain"] == after["found"] - after["found_turn_1"]
    page = (guessed / "report.html").read_text()
    assert "<h2>Episodes</h2>" in page and "found, turn 3" in page and "found peak" not in page
    assert "validation/found_turn_1" in rows(guessed)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "task.environment: expected a function with sampling.turns above 1"),
        ({"sampling.turns": 1, "task.environment": "a.py:b"}, "sampling.turns: expected at least 2 with task.env"),
        ({"task": f"{ROOT}/examples/own_task/task.py:Countdown"}, "this task has no environment"),
        ({"sampling.max_observation_tokens": 1, "task.environment": f"{CALCULATOR}:step"}, "_observation_tokens is 1"),
    ],
)
def test_mistakes_are_one_line(calculated, options, message, tmp_path, capsys):
    (tmp_path / "sums.txt").write_text("".join(f"{n} plus {n + 1}\n" for n in range(8)))
    (tmp_path / "mine.py").write_text("def brief(completions):\n    return [-len(t) for t in completions]\n")
    given = {
        "policy.path": calculated / "policy",
        "sampling.turns": 2,
        "sft.steps": 0,
        "sampling.max_new_tokens": 5,
        "sampling.max_observation_tokens": 4,
        **options,
    }
    task = given.pop("task", "text")
    if task == "text":
        given |= {"data.prompts": tmp_path / "sums.txt", "rewards": json.dumps([{"name": f"{tmp_path}/mine.py:brief"}])}
    assert main(command(task, tmp_path / "run", **given)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def distance(text):
    _, row, column, _, goal_row, goal_column = text.split()
    return abs(int(row) - int(goal_row)) + abs(int(column) - int(goal_column))


@pytest.mark.wide  # tests/turns/test_stepped_environments.py has three kinds in a run
def test_two_games_in_one_run_each_pay_by_their_own_rules(tmp_path, monkeypatch):
    """Two prompts in three are walks, paid for steps that lead nearer; what a guess earns follows from what was left.

    Both are recomputed from what the policy reads; an episode ends at its goal.
    """
    monkeypatch.chdir(ROOT)
    assert load_config(ROOT / "examples" / "grid" / "grid.yaml").task.environment == "examples/grid/grid.py:Grid"
    small = {name: SMALL[name] for name in ("sampling.group_size", "evaluation.samples")}
    small |= {"policy.new.width": 16, "policy.new.layers": 1, "policy.remat": "none", "training.max_steps": 1}
    small |= {"evaluation.prompts": 3, "evaluation.validation_prompts": 3, "report_to": "[]"}
    small |= {"task.seeds": 12, "training.prompts_per_batch": 12}
    command = ["--config", "examples/grid/with_guess.yaml", "--run_dir", str(tmp_path)]
    assert main([*command, *(f"--{name}={value}" for name, value in small.items())]) == 0
    played = episodes_of(tmp_path)
    kinds = [turns[0]["prompt"].split()[0] for turns in played]
    assert kinds.count("at") == 2 * kinds.count("guess") == 8 * small["sampling.group_size"]
    for turns in played:
        seen = prompt = turns[0]["prompt"]
        for turn in turns:
            walks = [turn[f"eval_rewards/reward_{name}"] for name in ("Grid", "Grid2")]
            walk, game = walks[math.isnan(walks[0])], turn["eval_rewards/reward_Guess"]
            assert math.isnan(game if prompt.startswith("at") else walk)
            assert turn["reward/reward"] == (walk if prompt.startswith("at") else game)
            if prompt.startswith("at") and turn["observation"] is None:  # it reached the goal, or had no more turns
                reached = distance(seen) == 1 and turn["reward/reward"] == 1
                assert turn is turns[-1] and (reached or len(turns) == 4)
            elif prompt.startswith("at"):
                assert turn["reward/reward"] == 0.5 * (distance(turn["observation"]) < distance(seen))
            elif turn["observation"] is not None:
                low, high = (int(seen.split()[place]) for place in (1, 3))
                left = [int(turn["observation"].split()[place]) for place in (1, 3)]
                guess = int(turn["completion"]) if turn["completion"].isdigit() else 0
                ruled_out = min(guess - low, high - guess) + 1 if low <= guess <= high else 0
                assert turn["reward/reward"] == pytest.approx(0.5 * ruled_out / (high - low + 1))
                expected = [[guess + 1, high], [low, guess - 1]] if ruled_out else [[low, high]]
                assert left in expected
            seen = turn["observation"]
