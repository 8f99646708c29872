"""A trained policy on the hub, pushed by the hub's library to a small server."""

import base64
import io
import json
import re

import pytest
from huggingface_hub import constants
from models.test_lora import ADAPTERS
from support.folders import load_folder
from support.served import Handler, serving
from support.text_task import train_here

from grpo_jax import export, train
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.models.hf.folder import push_folder
from grpo_jax.reports.output import RunOutput
from grpo_jax.tasks.task import Finished


class Hub(Handler):
    """Repositories are made and get files; a token that is not "writer" may not, and `full` refuses commits."""

    repos: dict  # name: {path: bytes}
    private: set
    full: set

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        place = re.fullmatch(r"/api/models/(.*)/(preupload|commit)/main", self.path)
        if self.headers.get("Authorization") != "Bearer writer":
            return self.answer(403, {"error": "Forbidden: you don't have the rights"})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            known = name in self.repos
            self.repos.setdefault(name, {})
            if not known and (asked.get("private") or asked.get("visibility") == "private"):
                self.private.add(name)
            return self.answer(409 if known else 200, {"url": f"{constants.ENDPOINT}/{name}", "id": name})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if place[2] == "preupload":
            files = [one["path"] for one in json.loads(body)["files"]]
            told = [{"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for path in files]
            return self.answer(200, {"files": told})
        if place[1] in self.full:
            return self.answer(507, {"error": "no room"})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "deletedFile":
                del self.repos[place[1]][line["value"]["path"]]
            if line["key"] == "file":
                self.repos[place[1]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{constants.ENDPOINT}/{place[1]}/commit/{'0' * 40}"
        return self.answer(200, {"success": True, "commitUrl": url, "commitOid": "0" * 40})

    def do_GET(self):
        name, tree = re.match(r"/api/models/(\w+/\w+)(/tree/main)?", self.path).groups()
        if name not in self.repos:
            return self.answer(404, {"error": "Repository not found"})
        files = [{"type": "file", "path": path, "size": 0, "oid": ""} for path in self.repos[name]]
        about = {"id": name, "sha": "0" * 40, "siblings": [], "private": name in self.private}
        self.answer(200, files if tree else about)

    def answer(self, code, content):
        self.reply(code, json.dumps(content).encode(), {"Content-Type": "application/json"})


@pytest.fixture(scope="module")
def hub():
    """The server, as the hub of this process, and its writer logged in."""
    handler = type("Filled", (Hub,), {"repos": {}, "private": set(), "full": set()})
    with serving(handler) as address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_TOKEN", "writer")
        yield handler


@pytest.fixture(scope="module")
def run_dir(hub, place, tmp_path_factory):
    """A run of adapters, pushed at its end; the settings, and so the programs, are those of models/test_lora.py."""
    run = tmp_path_factory.mktemp("pushed") / "run"
    assert train_here(place.config, run, *ADAPTERS, "--push_to_hub=me/at_the_end") == 0
    return run


def run_export(run_dir, out, *words):
    return export.main(["--run", str(run_dir), "--out", str(out), *words])


def test_a_run_pushes_its_policy_at_its_end(run_dir, hub):
    files = hub.repos["me/at_the_end"]
    assert {path.name: path.read_bytes() for path in (run_dir / "policy").iterdir()} == files
    assert "README.md" in files and "me/at_the_end" not in hub.private
    assert f"pushed: {constants.ENDPOINT}/me/at_the_end" in (run_dir / "train.log").read_text()


def test_a_hub_that_refuses_is_a_note_at_the_end_of_a_run(hub, tmp_path):
    hub.full.add("me/full")
    config = make_config(task="text", run_dir=str(tmp_path / "run"), push_to_hub="me/full", report_to=[])
    stream = io.StringIO()
    with RunOutput(config, stream=stream) as output:
        output.truncate(0)
        output.directory.policy.mkdir()
        (output.directory.policy / "config.json").write_text("{}")
        output.finish(Finished({"iterations": 1, "evaluation": {}}), config=config)
    policy = tmp_path / "run" / "policy"
    assert stream.getvalue().endswith(f"{policy} is complete, to push it again: hf upload me/full {policy} .\n")
    assert re.search("push_to_hub: .*507", stream.getvalue()) and (tmp_path / "run" / "summary.json").is_file()


def test_export_pushes_the_folder_with_its_card(run_dir, hub, tmp_path, capsys):
    for _ in range(2):  # into a repository that is there already too
        assert run_export(run_dir, tmp_path / "out", "--push_to_hub", "team/sums", "--dtype=bfloat16") == 0
        assert capsys.readouterr().out.endswith(f"pushed to {constants.ENDPOINT}/team/sums\n")
    files = hub.repos["team/sums"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    assert "team/sums" not in hub.private
    card = files["README.md"].decode()
    assert card == (run_dir / "policy" / "README.md").read_text() and "library_name: transformers" in card
    (tmp_path / "again").mkdir()
    for name, content in files.items():
        (tmp_path / "again" / name).write_bytes(content)
    assert load_folder(tmp_path / "again").config == load_folder(run_dir / "policy").config


def test_a_push_replaces_the_weights_of_another_kind(hub, tmp_path):
    """With adapter_config.json beside a whole policy, transformers loads the base and the older adapters."""
    index = "model.safetensors.index.json"
    for kind in (["adapter_config.json", "adapter_model.safetensors"], [index, "model-00001-of-00001.safetensors"]):
        hub.repos["me/twice"] = dict.fromkeys([*kind, "notes.txt"], b"older")
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        push_folder(tmp_path, "me/twice")
        assert hub.repos["me/twice"] == {"notes.txt": b"older", "model.safetensors": b"weights"}


def test_nothing_private_is_pushed_to_a_public_repository(hub, tmp_path):
    hub.repos["me/open"] = {}
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match="push_to_hub: me/open is there already and public: make it private on the hub"):
        push_folder(tmp_path, "me/open", private=True)
    assert hub.repos["me/open"] == {}


def test_adapters_say_on_their_card_what_they_are(run_dir, hub, tmp_path):
    assert run_export(run_dir, tmp_path, "--adapters", "--push_to_hub=me/adapters", "--private", "--checkpoint=1") == 0
    files = hub.repos["me/adapters"]
    card = files["README.md"].decode()
    assert "adapter_model.safetensors" in files and "me/adapters" in hub.private
    assert "library_name: peft" in card and "# LoRA adapters trained with grpo_jax\n" in card


def test_a_hub_that_refuses_leaves_the_folder_and_says_what_to_repeat(run_dir, hub, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    again = f"{out} is complete, to push it again: hf upload team/other {out} . --private\n"
    words = ["--push_to_hub=team/other", "--private"]
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", "reader")
        assert run_export(run_dir, out, *words) == 2
    said = capsys.readouterr().err
    assert re.match(r"error: push_to_hub: .*403.*; ", said)
    assert said.endswith(again) and said.count("\n") == 1 and (out / "model.safetensors").is_file()
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
        assert run_export(run_dir, out, *words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: push_to_hub: ") and said.endswith(again)


def test_what_cannot_work_is_said_before_anything_is_loaded(hub, tmp_path, capsys, monkeypatch):
    def refused(*words):
        assert run_export(tmp_path / "no_run", tmp_path / "out", *words) == 2
        return capsys.readouterr().err

    assert refused("--private") == "error: --private: it is for a repository of --push_to_hub\n"
    assert refused("--renderer", "--private") == "error: --private: it is for a repository of --push_to_hub\n"
    for name in ("a/b/c", "true", "me/.."):
        given = ["--push_to_hub", name]
        assert refused(*given) == f"error: push_to_hub: expected OWNER/NAME of a repository, got {name}\n"
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "nobody"))
    nobody = "error: push_to_hub: not logged in to the hub; run `hf auth login`, or set HF_TOKEN\n"
    assert refused("--push_to_hub", "me/sums") == nobody
    words = ["--task=text", "--policy.path=nowhere", "--data.prompts=x.txt", "--rewards=m:f", "--push_to_hub=me/sums"]
    assert train.main([*words, f"--run_dir={tmp_path / 'run'}"]) == 2
    assert capsys.readouterr().err == nobody and not (tmp_path / "run").exists()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused("--push_to_hub", "me/sums")
