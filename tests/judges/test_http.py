"""A judge behind HTTP: the example's server, one that fails, and the messages of a run without answers."""

import json
import sys
import threading
from contextlib import contextmanager, suppress

import pytest
from support.imports import ROOT
from support.served import Handler, serving

from bridges import placement
from grpo_jax.config.named import load_object
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.rewards import RewardError, collect_rewards

JUDGE = ROOT / "examples" / "judges" / "http.py"
Http, JudgeError = (load_object(f"{JUDGE}:{name}", "judge") for name in ("Http", "JudgeError"))
EXAMPLE = ROOT / "examples" / "http_judge" / "server.py"
PROMPTS, COMPLETIONS = ["abcd"] * 7, ["", "a", "ab", "abc", "abcd", "abcde", "ü€\n"]
SCORES = [None, 0.75, 0.5, 0.25, 0.0, -0.25, 0.25]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(sys.modules[Http.__module__], "FIRST_PAUSE", 0.001)


@pytest.fixture(scope="module")
def example():
    with serving(load_object(f"{EXAMPLE}:Judge", "server")) as url:
        yield url


class Script(Handler):
    """Does what `steps` says, one after the other, and then answers with the lengths of the completions."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.seen.append((asked, dict(self.headers)))
            step = self.steps.pop(0) if self.steps else None
        if step == "hang up":
            self.connection.close()
        elif step == "too late":
            self.late.wait(30)
        elif step == "cut off":
            self.reply(200, b'{"scores": [', missing=5)
        elif step == "slow body":
            self.trickle(b"HTTP/1.0 200 OK\r\n\r\n")
        elif isinstance(step, int):
            self.reply(step, b"", {"Retry-After": "0", "Location": "http://127.0.0.1:9/elsewhere"})
        elif isinstance(step, bytes):
            self.reply(200, step)
        else:
            self.reply(200, json.dumps({"scores": [len(text) for text in asked["completions"]]}).encode())

    def trickle(self, head):
        """A byte now and then, and never the last: no single read is late."""
        with suppress(OSError):
            self.wfile.write(head)
            while not self.late.wait(0.1):
                self.wfile.write(b"0")


@contextmanager
def scripted(*steps, **options):
    """A judge of a server that goes by a script, and what the server has seen."""
    state = {"steps": list(steps), "seen": [], "lock": threading.Lock(), "late": threading.Event()}
    with serving(type("Scripted", (Script,), state)) as url:
        try:
            yield Http(url=f"{url}/score", **options), state["seen"]
        finally:
            state["late"].set()


@pytest.mark.parametrize(("batch_size", "concurrency"), [(64, 1), (2, 4)])
def test_scores_come_in_order_however_they_are_asked_for(example, batch_size, concurrency):
    judge = Http(url=example, batch_size=batch_size, concurrency=concurrency).load("cpu")
    assert judge(PROMPTS, COMPLETIONS) == SCORES
    assert judge([], []) == []
    assert str(judge) == f"{example}: {concurrency} requests at once, of {batch_size} completions"


def test_the_example_is_short_and_a_column_that_the_data_lack_is_named(example):
    assert len(EXAMPLE.read_text().splitlines()) < 50
    with pytest.raises(UserError, match=r"^columns: expected columns of the data, got .'answer'"):
        Http(url=example, columns=["answer"]).load("cpu")(PROMPTS, COMPLETIONS)


def test_a_request_holds_the_columns_and_headers_that_the_config_names(monkeypatch):
    monkeypatch.setenv("JUDGE_HEADERS", "Authorization: Bearer a:b\n\nX-Team: red\n")
    options = {"columns": ["answer"], "headers_from": "JUDGE_HEADERS"}
    Http(url="http://localhost/x", **options).check()
    with scripted(**options, batch_size=2, concurrency=1) as (judge, seen):
        assert judge(["p", "q", "r"], ["a", "bb", "ccc"], answer=["1", None, {"n": 3}], other=[object()] * 3) == [
            1,
            2,
            3,
        ]
    assert [asked for asked, _ in seen] == [
        {"prompts": ["p", "q"], "completions": ["a", "bb"], "columns": {"answer": ["1", None]}},
        {"prompts": ["r"], "completions": ["ccc"], "columns": {"answer": [{"n": 3}]}},
    ]
    assert {(sent["Authorization"], sent["X-Team"]) for _, sent in seen} == {("Bearer a:b", "red")}


@pytest.mark.parametrize("step", [503, 429, "hang up", "cut off", "too late", "slow body"])
def test_what_passes_is_tried_again(step):
    steps, timeout = ([step], 1.0) if step in ("too late", "slow body") else ([step] * 2, 30)
    with scripted(*steps, attempts=3, timeout=timeout) as (judge, seen):
        assert judge(["p"], ["abc"]) == [3]
    assert len(seen) == len(steps) + 1 and seen[0][0] == seen[-1][0]


@pytest.mark.parametrize(
    ("steps", "message", "requests"),
    [
        ([503] * 3, r"HTTP 503 Service Unavailable, 3 attempts, http://127.0.0.1:\d+/score", 3),
        (["hang up"] * 3, r"RemoteDisconnected: .*, 3 attempts, http://127", 3),
        (["cut off"] * 3, r"HTTPException: the answer broke off 5 bytes before its end, 3 attempts, http://127", 3),
        (["slow body"] * 3, r"^no whole answer within 0\.5 s, 3 attempts, http://127", 3),
        ([404], r"HTTP 404 Not Found, http://127", 1),
        ([307], r"HTTP 307 Temporary Redirect, http://127", 1),
        ([b"<html>welcome</html>"], r'it must answer {"scores": \[...\]}, .* got <html>welcome</html>', 1),
        ([b'{"scores": [1, 2]}'], "one for each of 1 completions, got .*2", 1),
    ],
)
def test_a_judge_that_gives_no_scores_says_why_in_one_line(steps, message, requests):
    with scripted(*steps, attempts=3, timeout=0.5 if "slow body" in steps else 30) as (judge, seen):
        with pytest.raises(JudgeError, match=message) as caught:
            judge(["p"], ["abc"])
        assert len(seen) == requests and "\n" not in str(caught.value)


def test_one_batch_without_an_answer_calls_off_the_others():
    with scripted(404, "too late", "too late", batch_size=1, concurrency=1) as (judge, seen):
        with pytest.raises(JudgeError, match="HTTP 404"):
            judge(["p"] * 50, ["a"] * 50)
        assert len(seen) < 50


def test_no_server_at_all_and_what_a_run_makes_of_it():
    """The policy of the run decides: a stop that names the reward, or missing values."""
    with scripted() as (judge, _):
        pass  # its port is closed now
    judge = Http(url=judge.url + "?key=secret", attempts=2)
    with pytest.raises(RewardError, match=r"^reward far: it raised JudgeError: ConnectionRefusedError") as caught:
        collect_rewards({"far": judge}, ["p"] * 2, ["a"] * 2, {}, 2)
    assert "secret" not in str(caught.value) + str(judge) + str(caught.value.__cause__)
    missing = collect_rewards({"far": judge, "near": len_of}, ["p"] * 2, ["a", "bb"], {}, 2, on_error="missing")
    assert missing[0, :, 0].tolist() != missing[0, :, 0].tolist() and missing[0, :, 1].tolist() == [1, 2]


def len_of(completions):
    return [len(text) for text in completions]


@pytest.mark.parametrize("held", [None, "", "Bearer secret"])
def test_headers_that_are_none_are_refused_and_never_shown(monkeypatch, held):
    if held is not None:
        monkeypatch.setenv("JUDGE_HEADERS", held)
    with pytest.raises(UserError, match=r'lines "Name: value" in the environment variable JUDGE_HEADERS') as caught:
        Http(url="http://h/", headers_from="JUDGE_HEADERS").check()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/passwd", "url: expected http://HOST/… or https://HOST/…, got 'file"),
        ("https://me:word@host/", "url: expected no password in it, but headers_from, got 'https://…'"),
    ],
)
def test_addresses_that_are_refused(url, message):
    with pytest.raises(UserError) as caught:
        Http(url=url)
    assert message in str(caught.value) and "me:word" not in str(caught.value)


def test_no_card_is_kept_for_it_nor_torch_asked_for_one(monkeypatch):
    far = {"kind": f"{JUDGE}:Http", "url": "http://h/"}
    config = make_config(task="text", judges={"far": far, "near": {"kind": "open_clip"}}, devices={"near": "gpu:1"})
    assert config.requests == {"policy": "auto", "far": "cpu", "near": "gpu:1"}
    assert make_config(task="text", judges={"far": far}, devices={"far": "gpu:0"}).requests["far"] == "gpu:0"
    assert config.judges["far"].memory() == [("HTTP", 0, "runs elsewhere")]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert placement.place({"policy": "cpu", "far": "cpu"}) == ({"policy": "cpu", "far": "cpu"}, [])
