"""Policies by hub id: from the local cache, from a small server with the hub's protocol, and errors."""

import json
import os
import subprocess
import sys
from hashlib import sha1
from pathlib import Path

import pytest
from support.served import Handler, serving

from grpo_jax.errors import UserError
from grpo_jax.models.hf import folder as hf

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"[]",
    "pytorch_model.bin": b"a pickle",
    "modeling_mine.py": b"raise SystemExit",
}


def fill_cache(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """The layout of the hub's cache."""
    model = folder / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    for file, content in files.items():
        (snapshot / file).write_bytes(content)
    return snapshot


def test_a_cached_model_needs_no_network_and_half_of_one_is_none(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = fill_cache(tmp_path, "someone/model", FILES)
    assert hf.resolve_folder("someone/model") == snapshot
    fill_cache(tmp_path, "someone/half", {"config.json": b"{}", "tokenizer.json": b"{}"})
    with pytest.raises(UserError, match="hf auth login"):
        hf.resolve_folder("someone/half")


class Hub(Handler):
    """One public model and one gated one."""

    sent: list[str]

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/someone/model"):
            siblings = [{"rfilename": name} for name in FILES]
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": sha1(content).hexdigest()}
                for name, content in FILES.items()
            ]
            info = {"id": "someone/model", "sha": COMMIT, "siblings": siblings}
            return self.answer(200, json.dumps(tree if "/tree/" in path else info).encode())
        name = path.rpartition("/")[2]
        if path.startswith("/someone/model/resolve/") and name in FILES:
            if self.command == "GET":
                self.sent.append(name)
            return self.answer(200, FILES[name], **{"ETag": f'"{sha1(FILES[name]).hexdigest()}"'})
        if "gated" in path:
            return self.answer(403, b"", **{"X-Error-Code": "GatedRepo", "X-Error-Message": "It is gated."})
        return self.answer(404, b"", **{"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, content: bytes, **headers: str):
        self.reply(status, content, {"X-Repo-Commit": COMMIT} | headers)


RESOLVE = """
import sys
from grpo_jax.errors import UserError
from grpo_jax.models.hf import folder as hf
for name in sys.argv[1:]:
    try:
        print(hf.resolve_folder(name))
    except UserError as error:
        print("error:", error)
"""


def test_a_model_is_downloaded_once_without_pickles_and_code(tmp_path):
    environment = os.environ | {
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    names = ["someone/model", "someone/model", "someone/gated", "nobody/nothing"]
    command, sent = [sys.executable, "-c", RESOLVE, *names], []
    with serving(type("Filled", (Hub,), {"sent": sent})) as address:
        environment |= {"HF_ENDPOINT": address}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, second, gated, absent = result.stdout.splitlines()
    assert first == second
    assert sorted(path.name for path in Path(first).iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert (Path(first) / "model.safetensors").read_bytes() == b"weights"
    assert sorted(sent) == ["config.json", "model.safetensors", "tokenizer.json"]  # each once
    for line, name in ((gated, "someone/gated"), (absent, "nobody/nothing")):
        assert line.startswith(f"error: policy '{name}'") and "hf auth login" in line and "local folder" in line
