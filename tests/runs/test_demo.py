"""`grpo demo`: its scores equal those of `evaluate`; the page in a browser, and refused requests."""

import asyncio
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, closing

import numpy as np
import pytest
from support.text_task import ROOT, finished_run, wait_for

from grpo_jax import demo, evaluate, train
from grpo_jax.errors import UserError
from grpo_jax.runs.evaluation import InferenceSession, checkpoint_names

MINIATURE = (
    *("--training.max_steps=1", "--training.inner_epochs=1", "--training.prompts_per_batch=4"),
    *("--evaluation.prompts=2", "--evaluation.validation_prompts=1", "--report_to=[]"),
)
BROWSER = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


@pytest.fixture
def finished(place, monkeypatch):
    folder = finished_run(place)
    monkeypatch.setenv("JUDGE_RUN", str(folder))
    return folder


@pytest.fixture
def session(finished):
    with ExitStack() as exit_stack:
        yield InferenceSession(finished, lambda *_: None, exit_stack)


@pytest.fixture
def free():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_the_start_is_measured_as_the_run_measured_it(finished, capsys):
    summary = json.loads((finished / "summary.json").read_text())["evaluation"]
    assert evaluate.main(["--run", str(finished), "--json", "--checkpoint=start"]) == 0
    measured = json.loads(capsys.readouterr().out)["greedy"]
    assert measured == {name: each["before"] for name, each in summary.items()}
    steps = sorted({6, 3, int(os.readlink(finished / "checkpoints" / "best").removeprefix("step_"))}, reverse=True)
    assert checkpoint_names(finished, "best") == ["best", "final", *map(str, steps), "start"]


@pytest.mark.parametrize(("checkpoint", "when"), [("start", "before"), ("final", "after")])
def test_held_out_prompts_get_the_scores_of_the_run(finished, session, checkpoint, when):
    """Which `evaluate` repeats."""
    summary = json.loads((finished / "summary.json").read_text())["evaluation"]
    rows = session.ctx.test_rows
    each = [session.write(session.row(row.prompt, row.id), checkpoint)[0].last.rewards for row in rows]
    for name in ("letters", "brief"):
        assert np.mean([rewards[name] for rewards in each]) == pytest.approx(summary[name][when], rel=1e-6)


def test_a_typed_prompt_lacks_only_rewards_with_columns(session):
    assert session.unchanged(session.row("never seen", 7)) is None  # a text task's prompts are no completions
    (episode,) = session.write(session.row("never seen", 7), "final")
    rewards = episode.last.rewards
    assert np.isnan(rewards["letters"]) and rewards["brief"] == pytest.approx(-len(episode.last.completion) / 10)
    group = session.write(session.row("never seen", 7), "final", group=True)
    again = session.write(session.row("never seen", 7), "final", group=True)
    other = session.write(session.row("never seen", 8), "final", group=True)
    texts = [[one.last.completion for one in episodes] for episodes in (group, again, other)]
    assert len(group) == 4 and texts[0] == texts[1] != texts[2]


def test_space_around_a_typed_prompt_changes_nothing(session):
    """A row of the data has none; with it the policy read other tokens, and the columns were lost."""
    held_out = session.ctx.test_rows[0]
    assert session.row(f" {held_out.prompt}\n", held_out.id) == held_out
    assert session.row("never seen ", 7) == session.row("never seen", 7)


@pytest.mark.parametrize(("prompt", "seed"), [(" \n", 1), ("a tree", -1), ("a tree", 2**32), ("tree " * 99, 1)])
def test_empty_prompts_and_bad_seeds_are_refused(session, prompt, seed):
    with pytest.raises(UserError, match=r"^(prompt|seed)"):
        session.row(prompt, seed)


def test_refusals_are_one_line_before_anything_is_loaded(finished, free, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", free)):
        refused = {
            ("--run", str(tmp_path)): "no config.yaml there",
            ("--run", str(finished), "--checkpoint=77"): "no checkpoint '77'",
            ("--run", str(finished), "--beside=77"): "--beside: expected one of final, best, 6, ",
            ("--run", str(finished), f"--port={free}"): f"--port: cannot listen on 127.0.0.1:{free}",
            ("--run", str(finished), "--port=99999"): "--port: expected a number from 1 to 65535, got 99999",
        }
        for arguments, says in refused.items():
            assert demo.main(arguments) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("error: ") and says in line


def test_a_prompt_of_megabytes_is_refused_before_it_is_tokenised(session, finished, monkeypatch, tmp_path, capsys):
    """As typed, and as a row of a data file."""
    from transformers import PreTrainedTokenizerFast

    encode, lengths = PreTrainedTokenizerFast._encode_plus, []

    def counted(self, text, *arguments, **options):
        lengths.append(len(str(text)))
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", counted)
    with pytest.raises(UserError, match=r"has 2,999,998 bytes, too many for data\.max_prompt_tokens"):
        session.row("tree\n " * 500_000, 1)
    rows = [{"prompt": letter * (3_000_000 if letter == "d" else 3), "wish": "a"} for letter in "abcd"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--config", str(finished / "config.yaml"), f"--data.prompts={tmp_path / 'prompts.jsonl'}"]
    assert train.main([*words, f"--run_dir={tmp_path / 'run'}", "--data.held_out=0"]) == 2
    assert "has 3,000,00" in capsys.readouterr().err
    assert max(lengths, default=0) < 10_000


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/gradio_api/upload", {}, 413),
        ("/gradio_api/queue/join", {b"content-length": b"60000000"}, 413),
        ("/gradio_api/queue/join", {b"content-length": b"many"}, 413),
        ("/gradio_api/queue/join", {b"transfer-encoding": b"chunked"}, 413),
        ("/gradio_api/queue/join", {b"content-length": b"200"}, 200),
    ],
)
def test_uploads_and_long_requests_are_refused(path, headers, code):
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    asyncio.run(demo.Guard(app)({"type": "http", "path": path, "headers": [*headers.items()]}, None, send))
    assert sent[0]["status"] == code


def needs_gradio():
    pytest.importorskip("gradio", reason="the page needs grpo_jax[demo]")


@pytest.fixture
def served(finished, free, tmp_path):
    """Serves a run by the command: run, or None for the text task's → its address."""
    needs_gradio()
    with ExitStack() as exit_stack:

        def serve(run):
            command = [sys.executable, "-m", "grpo_jax.demo", "--run", str(run or finished), f"--port={free}"]
            log = exit_stack.enter_context((tmp_path / "log").open("w+"))
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=os.environ.copy())
            exit_stack.callback(process.wait)
            exit_stack.callback(process.kill)
            wait_for(lambda: "serving" in (tmp_path / "log").read_text(), process)
            return f"http://127.0.0.1:{free}"

        yield serve


def status_of(address, path, body=b"", **headers):
    """The status that a request gets."""
    with closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)) as connection:
        connection.request("POST" if body else "GET", path, body or None, headers)
        return connection.getresponse().status


@pytest.mark.slow
def test_other_names_and_uploads_are_refused(served):
    address = served(None)
    assert status_of(address, "/") == 200
    assert status_of(address, "/", Host="evil.example") == 400  # a name that was made to lead here
    part = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\nabc\r\n--b--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert status_of(address, "/gradio_api/upload", part, **kind) == 413
    assert status_of(address, "/upload", part, **kind) == 413
    assert status_of(address, "/gradio_api/queue/join", b"x" * 2**21) == 413


@pytest.mark.slow
def test_the_demo_in_a_browser(served, tmp_path, capsys):
    needs_gradio()
    sync_api = pytest.importorskip("playwright.sync_api", reason="the page is looked at with playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("the page is looked at in chromium, which is not installed")
    from grpo_jax.train import main

    run = tmp_path / "run"
    assert main([*MINIATURE, f"--run_dir={run}"]) == 0
    capsys.readouterr()
    address = served(run)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.click("#ask")
        page.wait_for_selector("#line [role=alert]")
        assert page.inner_text("#line").strip() == "prompt: expected a text, got ''"
        page.locator("tr.tr-body, .gallery-item").first.click()
        page.wait_for_function("document.querySelector('#prompt textarea').value != ''")
        page.click("#ask")
        page.wait_for_selector("#shown .answer", timeout=600_000)
        shown = page.locator("#shown article").all_inner_texts()
        pictures = page.locator("#shown article img").count()
        widths = []
        for width in (1400, 390):
            page.set_viewport_size({"width": width, "height": 844})
            widths.append(page.evaluate("document.documentElement.scrollWidth"))
        browser.close()
    assert [text.split("\n")[0] for text in shown] == ["the prompt as typed", "final", "start"] and pictures == 3
    assert widths == [1400, 390]
    assert all(url.startswith((address, "data:", "blob:")) for url in requests)
