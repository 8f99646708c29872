"""Environment classes: one step per turn, replay after a stop, several kinds."""

import asyncio
import dataclasses
import itertools
import json
import math
from contextlib import ExitStack

import pytest
import yaml
from support.rollouts import single_turns
from support.text_task import assert_same_run, episodes_of, rewound, train_here

from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import Episode, Turn
from grpo_jax.rollout.env_adapters import EnvRunner
from grpo_jax.runs.evaluation import InferenceSession

WORLDS = '''
class Count:
    """Replies with how many words it was given; ends at "b"; a digit is worth one more."""

    words = ("a", "b", "seen", *map(str, range(6)))

    def reset(self, seed):
        self.seen = seed % 3
        return f"a {self.seen}"

    def step(self, text):
        self.seen += 1
        done = text == "b"
        return None if done else f"seen {self.seen}", self.seen / 10 + text.isdigit(), done


class Later(Count):
    """The same, asked over a network."""

    async def step(self, text):
        return Count.step(self, text)


class Fragile(Count):
    """Raises at "b"."""

    def step(self, text):
        if text == "b":
            raise OSError("the world is gone")
        return Count.step(self, text)


class Mute(Count):
    def reset(self, seed):
        return " "


class Broken(Count):
    def step(self, text):
        return "seen"
'''
SMALL = {
    "task": {"kind": "environment", "seeds": 8},
    "report_to": [],
    "policy": {"path": "new", "new": {"width": 16, "heads": 2, "layers": 1, "window": 32}, "remat": "none"},
    "data": {"max_prompt_tokens": 4},
    "sampling": {"turns": 2, "group_size": 4, "max_new_tokens": 1, "max_observation_tokens": 4},
    "algorithm": {"advantage": "grpo"},
    "training": {"prompts_per_batch": 8, "max_steps": 2, "save_every": 1},
    "evaluation": {"every": 1, "samples": 0, "prompts": 4, "validation_prompts": 4},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("worlds")
    (home / "worlds.py").write_text(WORLDS)
    return home


def config(home, *names, **sections):
    """A config of environments; several have names."""
    paths = {name: f"{home}/worlds.py:{name.rstrip('2')}" for name in names}
    named = paths if len(names) > 1 else "".join(paths.values())
    values = {**SMALL, "task": {**SMALL["task"], "environment": named}, **sections}
    file = home / f"{'_'.join(names)}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


NAMES = ("Count", "Fragile", "Later", "Fragile2")


@pytest.fixture(scope="module")
def run(home):
    """Three kinds in one run, one of them an objective of its own, one that raises."""
    rewards = [{"name": "reward"}, {"name": "reward_Later", "weight": 2.0}]
    file = config(home, *NAMES, rewards=rewards, on_judge_error="missing")
    assert train_here(file, home / "run") == 0
    return home / "run"


@pytest.fixture(scope="module")
def episodes(run):
    return episodes_of(run)


def kind_of(row):
    """The kind of environment that judged a row, by its watched reward; "" where it raised."""
    kinds = [name for name in NAMES if not math.isnan(row[f"eval_rewards/reward_{name}"])]
    assert len(kinds) <= 1
    return kinds[0] if kinds else ""


def test_rewards_are_those_of_each_step(run, episodes):
    """Recomputed from the prompts and the texts."""
    judged = [row for turns in episodes for row in turns if not math.isnan(row["reward/reward"])]
    assert {kind_of(row) for row in judged} == {*NAMES} and len(judged) > 24
    for row in judged:
        worth = (int(row["prompt"].split()[1]) + row["turn"]) / 10 + row["completion"].isdigit()
        assert row["reward/reward"] == row[f"eval_rewards/reward_{kind_of(row)}"] == pytest.approx(worth)
    summary = json.loads((run / "summary.json").read_text())["evaluation"]
    assert all(math.isfinite(summary[name]["after"]) for name in ("reward", "reward_Count", "reward_Later"))


def test_kinds_may_be_objectives_of_their_own(run, episodes):
    """Each is missing where another is judged, and takes no part there."""
    for row in [row for turns in episodes for row in turns]:
        assert math.isnan(row["reward/reward_Later"]) == (kind_of(row) != "Later"), row
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["missing/reward_Later"] < 1 and math.isfinite(row["grad_norm"]) for row in rows)


def test_an_environment_that_raises_costs_its_own_episode_alone(home, episodes, tmp_path, capsys):
    """Its rewards are missing; the default stops the run and names the line."""
    seen = set()
    for turns in episodes:
        missing = [math.isnan(row["reward/reward"]) for row in turns]
        seen.add(any(missing))
        if any(missing):
            assert turns[-1]["completion"] == "b" and "b" not in [row["completion"] for row in turns[:-1]]
            assert all(missing) or missing == [False, True]
    assert seen == {False, True}
    assert train_here(config(home, "Fragile"), tmp_path / "stopped") == 2
    error = capsys.readouterr().err
    assert f"reward reward: it raised OSError: the world is gone ({home}/worlds.py:" in error and error.count("\n") == 1


def test_a_resumed_run_equals_an_uninterrupted_run(run, home, tmp_path):
    again = rewound(run, tmp_path / "again", 1)
    assert train_here(home / f"{'_'.join(NAMES)}.yaml", again, "--resume") == 0
    assert_same_run(again, run)


def test_the_demo_plays_held_out_episodes_and_refuses_other_prompts(run):
    with ExitStack() as exit_stack:
        session = InferenceSession(run, lambda *_: None, exit_stack)
        prompt = next(row.prompt for row in session.ctx.test_rows if row.columns["environment"] == "Count")
        (episode,) = session.write(session.row(prompt, 1), "final")
        assert "seen" in episode.turns[0].observation.text
        with pytest.raises(UserError, match="environments make their own prompts; choose a held-out prompt"):
            session.row("b", 1)


def test_a_reward_that_is_no_number_is_named():
    """An observation before it filled the line."""

    class World:
        def reset(self, seed):
            return "go"

        def step(self, text):
            return "a long observation " * 9, "high", False

    row = Row(0, "go", {"environment": "World", "seed": 5})
    (error,) = EnvRunner({"World": World}).step([row], [Episode((Turn(""),))])
    assert str(error) == "its reward must be a finite number or None, got 'high'"


def test_plain_methods_may_call_asyncio_run():
    """As in TRL, and as a browser's synchronous interface does; the tasks of the common loop continue after them."""

    async def plus(number, more):
        await asyncio.sleep(0)
        return number + more

    class World:
        def __init__(self):
            self.number = asyncio.run(plus(0, 1))

        def reset(self, seed):
            self.number = asyncio.run(plus(self.number, seed))
            return "go"

        async def step(self, text):
            return str(await plus(self.number, 1)), None, False

    class Plain(World):
        def step(self, text):
            return str(asyncio.run(plus(self.number, 1))), None, False

    runner = EnvRunner({"World": World, "Plain": Plain})
    rows = [Row(0, "go", {"environment": kind, "seed": 5}) for kind in ("Plain", "World")] * 2
    assert runner.step(rows, [Episode((Turn(""),)) for _ in rows]) == ["7"] * 4


def test_each_episode_steps_an_environment_of_its_own_once_for_each_text():
    made, steps = [], []

    class World:
        def __init__(self):
            made.append(self)

        def reset(self, seed):
            self.seed, self.read = seed, []
            return "go"

        def step(self, text):
            steps.append(text)
            self.read.append(text)
            return " ".join(self.read), float(len(self.read)), len(self.read) == 3

    runner = EnvRunner({"World": World})
    row = Row(0, "go", {"environment": "World", "seed": 5})
    episodes = [Episode((Turn(text),)) for text in "aab"]

    def go_on(texts):
        for place, text in enumerate(texts):
            episodes[place] = dataclasses.replace(episodes[place], turns=(*episodes[place].turns, Turn(text)))

    assert runner.step([row] * 3, episodes) == ["a", "a", "b"] and len(made) == 3  # equal texts too
    go_on("cde")
    assert runner.step([row] * 3, episodes) == ["a c", "a d", "b e"]
    assert len(made) == 3 and steps == [*"aabcde"]
    go_on("f")
    own = {"environment": ["World"], "seed": [5], "episodes": episodes[:1]}
    assert runner.reward(**own) == [3.0] and runner.step([row], episodes[:1]) == [None]
    assert len(steps) == 7 and [play.environment for play in runner.plays(own)] == made[:1]
    assert runner.step([row], [Episode(tuple(map(Turn, "acf")))]) == [None] and len(made) == 4  # another episode
    (alone,) = single_turns([["a", "a"]])
    own = {"environment": ["World"] * 2, "seed": [5, 5], "episodes": alone}
    assert runner.reward(**own) == runner.reward(**own) == [1, 1] and len(made) == 6  # several rewards take one step


@pytest.mark.parametrize("old", [["a.py:A", "b.py:B"], {"a.py:A": 3, "b.py:B": 1}])
def test_lists_and_shares_name_their_successor(old):
    with pytest.raises(
        UserError, match=r"task.environment: expected a class, or \{name: class\} for several, which take"
    ):
        make_config(task={"kind": "environment", "environment": old}, policy={"path": "new"})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "task.environment: expected a class, such as my_env.py:Env"),
        (("Missing",), "has no Missing"),
        (("Mute",), "task.environment: Mute.reset(0) must return the prompt, a text or chat messages, got ' '"),
        (("Broken",), "observation no None unless it is done, got 'seen'. Nothing was trained yet"),
    ],
)
def test_a_bad_environment_is_one_line(home, tmp_path, capsys, names, message):
    assert train_here(config(home, *names), tmp_path / "run") == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message.format(home=home) in error[0], error


def test_an_episode_that_begins_with_other_messages_than_its_prompt_fails():
    numbers = itertools.count()

    class Chat:
        def reset(self, seed):
            return [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{next(numbers)} + 1"}]

        def step(self, text):
            return None, 1.0, True

    runner = EnvRunner({"Chat": Chat})
    runner.prompt("Chat", 3, "reset")
    row = Row(0, "0 + 1", {"environment": "Chat", "seed": 3})
    (failure,) = runner.step([row], [Episode((Turn("1"),))])
    assert "reset of Chat returned 'Add.0 + 1' for the prompt and 'Add.1 + 1' for an episode of it" in str(failure)
