"""A real OpenEnv server: its action is a tool, its reward the episode's, and no session outlives its episode."""

import gc
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from support.imports import ROOT
from support.text_task import train_values
from support.tiny_models import causal_lm

from grpo_jax.errors import UserError
from grpo_jax.rollout import openenv
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import Episode, Turn
from grpo_jax.rollout.env_adapters import ToolEpisodes
from grpo_jax.rollout.tools import toolbox

pytest.importorskip("websockets", reason="needs grpo_jax[environments]")
PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable if importlib.util.find_spec("openenv") else "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="OPENENV_PYTHON names a Python with the package openenv")

SERVER = """
import sys, uvicorn
from openenv.core.env_server import create_app
sys.path.insert(0, sys.argv[2])
from server import Game, Guess, Hint

class Counted(Game):
    alive = made = 0
    def __init__(self):
        super().__init__()
        Counted.alive += 1
        Counted.made += 1
    def close(self):
        Counted.alive -= 1
    def step(self, action, **options):
        if action.number == 99:
            raise ValueError("so many are not there")
        if action.number == 98:
            import os
            os._exit(3)
        return super().step(action, **options)

app = create_app(Counted, Guess, Hint, max_concurrent_envs=int(sys.argv[3]))
app.get("/count")(lambda: [Counted.alive, Counted.made])
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


class Server:
    def __init__(self, folder, sessions):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (folder / f"counted_{self.port}.py").write_text(SERVER)
        words = [PYTHON, folder / f"counted_{self.port}.py", self.port, ROOT / "examples" / "openenv", sessions]
        self.process = subprocess.Popen([*map(str, words)])
        self.name = f"openenv:http://127.0.0.1:{self.port}"
        self.wait(lambda: self.count() == [0, 0], lenient=True)

    def count(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/count", timeout=60) as answer:
            return json.load(answer)

    def wait(self, condition, *, lenient=False):
        for _ in range(600):
            try:
                if condition():
                    return
            except OSError:
                assert lenient and self.process.poll() is None
            time.sleep(0.5)
        raise AssertionError("it did not come true")

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    one = Server(tmp_path_factory.mktemp("server"), 64)
    yield one
    one.stop()


@pytest.fixture
def fragile(tmp_path):
    """One session at a time; it is killed by a test."""
    one = Server(tmp_path, 1)
    yield one
    one.stop()


def call(number):
    return f'<tool_call>{{"name": "step", "arguments": {{"number": {json.dumps(number)}}}}}</tool_call>'


def episodes_of(server):
    return ToolEpisodes({"OpenEnv": toolbox((server.name,))})


def play(episodes, row, texts, *, final=False):
    """Step one episode, turn by turn, as a rollout does; its observations, its reward, and itself."""
    columns = {name: [value] for name, value in row.columns.items()}
    seen, episode = [], Episode((), memory={})
    for place, text in enumerate(texts):
        last = final and place == len(texts) - 1
        episode = Episode((*episode.turns, Turn(text, text)), last, memory=episode.memory)
        seen += episodes.runner.step([row], [episode])
    return seen, episodes.runner.reward(**columns, episodes=[episode])[0], episode


def right(row):
    return random.Random(row.id).randint(1, 7)


def test_an_action_is_a_tool_with_the_servers_schema(server):
    (schema,) = toolbox((server.name,)).schemas
    assert schema["function"]["name"] == "step" and schema["function"]["description"] == "Guess the number."
    parameters = schema["function"]["parameters"]
    assert {*parameters["properties"]} == {"number"} and parameters["required"] == ["number"]
    assert parameters["properties"]["number"]["type"] == "integer"


def test_an_episode_is_a_session_with_the_servers_reward(server):
    episodes = episodes_of(server)
    row = episodes.start_episode(Row(5, "Play."))
    assert row.prompt == "Play.Guess a number from 1 to 7." and right(row) == 5
    server.wait(lambda: server.count()[0] == 0)  # that of the prompt
    seen, reward, unfinished = play(episodes, row, [call(7), call(1)])
    assert [one.text for one in seen] == ["lower", "higher"] and reward is None
    assert server.count()[0] == 1
    seen, reward, _ = play(episodes, row, [call(7), call(5)])  # another session
    assert seen[0].text == "lower" and seen[1] is None and reward == 1.0
    seen, reward, _ = play(episodes, row, [call(7), call(1)], final=True)
    assert [one.text for one in seen] == ["lower", "higher"] and reward == 0.0
    seen, reward, _ = play(episodes, row, ["I give up"])
    assert seen == [None] and reward == 0.0
    server.wait(lambda: server.count()[0] == 1)  # only the unfinished one
    del unfinished
    gc.collect()
    server.wait(lambda: server.count()[0] == 0)


def test_the_policy_reads_the_servers_refusals(server):
    episodes = episodes_of(server)
    row = episodes.start_episode(Row(3, "Play."))
    seen, reward, _ = play(episodes, row, [call("many"), call(99), call(right(row))])
    assert seen[0].text.startswith("error: Invalid message") and "valid integer" in seen[0].text
    assert seen[1].text == "error: so many are not there"
    assert seen[2] is None and reward == 1.0


def test_a_full_server_says_so(fragile):
    episodes = episodes_of(fragile)
    row = episodes.start_episode(Row(3, "Play."))
    fragile.wait(lambda: fragile.count()[0] == 0)
    keep = Episode((Turn(call(1), call(1)),))
    assert episodes.runner.step([row], [keep])[0].text == "higher"
    (failed,), *_ = play(episodes, row, [call(3)])
    assert "raise its max_concurrent_envs" in str(failed) and f"127.0.0.1:{fragile.port}" in str(failed)


def test_a_server_that_dies_fails_the_episode(fragile, monkeypatch):
    monkeypatch.setattr(openenv, "_ATTEMPTS", 1)
    episodes = episodes_of(fragile)
    row = episodes.start_episode(Row(3, "Play."))
    seen, reward, _ = play(episodes, row, [call(1), call(98)])
    assert seen[0].text == "higher" and isinstance(seen[1], UserError) and reward is seen[1]
    (failed,), *_ = play(episodes, row, [call(3)])
    assert f"127.0.0.1:{fragile.port}: no connection" in str(failed)


@pytest.mark.parametrize("name", ["openenv:ftp://host", "openenv:file:///etc", "openenv:http://", "openenv:http://a?b"])
def test_only_http_addresses_are_taken(name):
    with pytest.raises(UserError, match=r"expected openenv:http://HOST:PORT"):
        toolbox((name,))


def test_an_absent_server_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        name = f"openenv:http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UserError, match=r"127\.0\.0\.1:\d+/schema: ConnectionRefusedError.*does it run\?"):
            toolbox((name,))


@pytest.mark.slow
def test_a_run_plays_and_leaves_no_session(server, tmp_path, capsys):
    policy = causal_lm(tmp_path / "policy", num_hidden_layers=1)
    (policy / "chat_template.jinja").write_text(
        "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    values = {
        "task": {"kind": "text", "seeds": 16},
        "report_to": [],
        "policy": {"path": str(policy), "remat": "none"},
        "data": {"tools": [server.name], "max_prompt_tokens": 512},
        "sampling": {"turns": 2, "group_size": 2, "max_new_tokens": 4, "max_observation_tokens": 64},
        "training": {"prompts_per_batch": 4, "max_steps": 1, "save_every": 0},
        "evaluation": {"every": 0, "samples": 0},
    }
    before = server.count()[1]
    train_values(values, tmp_path / "run")
    assert f"127.0.0.1:{server.port}: the policy's actions are sent" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["reward/reward/mean"] == 0.0  # it writes no call
    assert server.count()[1] >= before + 16 + 2 + 8  # prompts, and the episodes of a batch
    gc.collect()
    server.wait(lambda: server.count()[0] == 0)
