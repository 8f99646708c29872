"""The output of --help: first screen, section, field and all fields, with current values."""

import re
import subprocess
import sys

import pytest
from support.text_task import ROOT

from grpo_jax import __main__, train
from grpo_jax.config.fields import walk
from grpo_jax.config.run import TASKS, make_config
from grpo_jax.config.sections import RewardSection
from grpo_jax.planning.targets import TARGETS

LINES, COLUMNS = 40, 100


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def printed(capsys, *words, command=train.main):
    """Return the output of a command that ends by itself."""
    with pytest.raises(SystemExit) as ended:
        command(list(words))
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def fits(text, lines=LINES):
    return len(text.splitlines()) <= lines and max(map(len, text.splitlines())) <= COLUMNS


@pytest.mark.parametrize("task", TASKS.kinds)
def test_the_first_screen_and_every_section_fit(task, capsys):
    first = printed(capsys, "--task", task, "--help")
    assert fits(first) and f" {task} " in first
    listed = re.findall(r"^  ([a-z][\w.]*) ", first[first.index("\nSections") : first.index("\nMore")], re.MULTILINE)
    for section in listed:
        shown = printed(capsys, "--task", task, "--help", section)
        assert shown.startswith(section) and fits(shown, 140), section
    assert {"run", "task", "policy", "training"} < set(listed)


@pytest.mark.parametrize(
    "words",
    [[name] for name in __main__._COMMANDS] + [["plan", "--training.max_steps=3"]],
)
def test_every_command_has_a_screen_of_its_own(words, capsys):
    for asked in ("--help", "-h"):
        text = printed(capsys, *words, asked, command=__main__.main)
        assert fits(text) and text.startswith("usage: ")
        assert (f"grpo {words[0]} " if words[0] in ("train", "plan", "resume") else words[0]) in text.splitlines()[0]
    assert "max_steps         3" in text or words != ["plan", "--training.max_steps=3"]


def test_the_screen_of_plan_names_every_target(capsys):
    assert TARGETS.keys() <= {*re.findall(r"\w+", printed(capsys, "plan", "--help", command=__main__.main))}


def test_a_section_has_type_value_and_sentence_of_each_field(capsys):
    words = ["--task=text", "--sampling.top_k=3", "--data.columns.prompt=ask"]
    shown = printed(capsys, *words, "--help", "sampling")
    assert "  --sampling.top_k  INT  (default: 3)\n      Sample from the k likeliest tokens; 0 for all.\n" in shown
    assert "  --sampling.stop  [TEXT, …]  (default: [])\n      Texts that end a completion" in shown
    assert '(default: {"prompt": "ask"})' in printed(capsys, "--help", "data", *words)
    judges = printed(capsys, "--task=prompt_enhancement", "--help", "judges")
    assert "--judges.renderer.steps  INT" in judges and "--judges.scorer.model  TEXT" in judges
    shown = printed(capsys, "--help", "policy")
    assert "--policy.remat  none|products|layer  (default: products)" in shown and "--policy.lora.rank" in shown
    shown = printed(capsys, "--help", "rewards")
    names = re.findall(r"^  rewards\[]\.(\w+)  ", shown, re.MULTILINE)
    assert names == [*RewardSection.model_fields] and "(must be given)" in shown


def test_a_field_is_shown_whole_also_by_its_last_name_or_trls(capsys):
    whole = printed(capsys, "--help", "sampling.stop")
    assert whole.startswith("  --sampling.stop  ") and "kept and trained" in " ".join(whole.split())
    assert printed(capsys, "--help", "stop") == whole
    assert printed(capsys, "--help", "num_generations").startswith("  --sampling.group_size  INT  (default: 8)")
    shown = printed(capsys, "--config=prompt_enhancement_miniature", "--help", "dtype")
    assert "--judges.renderer.dtype" in shown and "--judges.scorer.dtype" in shown
    assert printed(capsys, "--help", "rewards.weight").startswith("  rewards[].weight  NUMBER  (default: 1.0)")


def test_all_of_it_is_every_field_without_a_usage(capsys):
    text = printed(capsys, "--task", "text", "--help", "all")
    assert "usage" not in text and max(map(len, text.splitlines())) <= COLUMNS
    config = make_config(task="text")
    assert all(f"{field.path}  " in text for field in walk(type(config), config) if field.inner is None)
    assert "kept and trained" in " ".join(text.split())


@pytest.mark.parametrize(
    ("task", "option", "section"),
    [
        ("recommendation", "--task.dummy_users=123", "task"),
        ("prompt_enhancement", "--judges.renderer.steps=17", "judges.renderer"),
        ("examples/own_task/task.py:Countdown", "--task.largest=7", "task"),
    ],
)
def test_task_and_judges_in_use_have_their_sections(task, option, section, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, _, value = option.partition("=")
    for words in (["--help", section, "--task", task, option], ["--task", task, option, "-h", section]):
        assert f"  {name}  INT  (default: {value})\n" in printed(capsys, *words)
    assert f"default: {task})" in " ".join(printed(capsys, "--task", task, "--help", "task").split())


def test_what_is_no_section_is_told_the_nearest(capsys):
    wrong = {
        "smapling": "error: --help smapling: no such section; did you mean sampling?\n",
        "sampling.goup_size": "error: --help sampling.goup_size: no such section; did you mean sampling.group_size?\n",
    }
    for topic, said in wrong.items():
        for words in (["--help", topic], [f"--help={topic}"], ["--seed", "3", "-h", topic, "--task", "text"]):
            assert train.main(words) == 2
            assert capsys.readouterr().err == said


def test_a_reader_that_has_read_enough_is_no_mistake():
    command = [sys.executable, "-m", "grpo_jax.train", "--task=text", "--help", "all"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    process.stderr.close()


def test_a_run_that_is_resumed_shows_its_own_values(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("task: text\ntraining: {max_steps: 77}\n")
    text = printed(capsys, "resume", str(tmp_path), "--help", "training.max_steps", command=__main__.main)
    assert "(default: 77)" in text
