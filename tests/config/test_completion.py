"""`grpo completion`: the script, in the shells that are there."""

import contextlib
import io
import shutil
import subprocess

import pytest
from support.text_task import ROOT

from grpo_jax import __main__
from grpo_jax.planning import MEMORY, PLAN

ASK = """
source "$1"
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _grpo; echo "$* > ${COMPREPLY[*]}"; }
"""
CASES = {
    "grpo tr": "train",
    "grpo train --sampling.group_": "--sampling.group_size",
    "grpo plan --dev": "--devices --device_memory_gib",
    "grpo train --judges.renderer.st": "--judges.renderer.steps",
    "grpo train --rollout.gr": "--rollout.groups --rollout.group_size",
    "grpo train --task te": "text",
    "grpo train --config cartpole_p": "cartpole_ppo",
    "grpo train --help policy.l": "policy.lora",
    "grpo train --policy.remat l": "layer",
    "grpo train --policy.remat = l": "layer",  # bash makes words of its own of --policy.remat=l
    "grpo train --policy.remat =": "none products layer",
    "grpo train --policy.path fol": "",  # what is there, by bash itself
    "grpo export --dtype b": "bfloat16",
    "grpo evaluate --che": "--checkpoint",
    "grpo resume run": "",
    "grpo completion f": "fish",
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Writes the script of a shell."""

    def write(shell):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert __main__.main(["completion", shell]) == 0
        path = tmp_path_factory.mktemp(shell) / "_grpo"
        path.write_text(said.getvalue())
        return path

    return write


def test_bash_completes_commands_options_and_values(script):
    """Without Python, or any other program, on the path."""
    asked = "".join(f"ask {words}\n" for words in CASES)
    done = subprocess.run(
        [shutil.which("bash"), "--norc", "-c", ASK + asked, "bash", str(script("bash"))],
        env={"PATH": ""}, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert dict(line.split(" >", 1) for line in done.stdout.splitlines()) == {
        words: f" {found}" for words, found in CASES.items()
    }


def test_what_a_plan_is_asked_is_among_the_words(script):
    assert {PLAN, MEMORY} <= {*script("bash").read_text().replace(";", " ").replace('"', " ").split()}


def test_bash_knows_whose_completion_it_is(script):
    done = subprocess.run(
        ["bash", "--norc", "-c", f"source {script('bash')}; complete -p grpo"], capture_output=True, text=True
    )
    assert done.stdout == "complete -o default -F _grpo grpo\n"


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_completes(script):
    ask = f"source {script('fish')}; complete -C 'grpo train --sampling.group_'; complete -C 'grpo export --dtype b'"
    done = subprocess.run(["fish", "--no-config", "-c", ask], capture_output=True, text=True, timeout=600)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["--sampling.group_size", "bfloat16"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_reads_the_script(script):
    assert subprocess.run(["zsh", "-n", str(script("zsh"))], timeout=600).returncode == 0


def test_other_shells_and_help(capsys):
    assert __main__.main(["completion", "tcsh"]) == __main__.main(["completion"]) == 2
    expected = "error: completion: expected bash, zsh or fish, got"
    assert capsys.readouterr().err == f"{expected} tcsh\n{expected} nothing\n"
    assert __main__.main(["completion", "--help"]) == 0
    assert "grpo completion bash > " in capsys.readouterr().out
    for shell, sign in (("zsh", "#compdef grpo\n"), ("fish", "complete -c grpo ")):
        assert __main__.main(["completion", shell]) == 0
        shown = capsys.readouterr().out
        assert sign in shown and "sampling.group_size" in shown
