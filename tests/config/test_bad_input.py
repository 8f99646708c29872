"""Users' errors: one clear line, exit code 2, no traceback, nothing lost."""

import shutil

import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.train import main
from grpo_jax.train import run as train


@pytest.fixture
def run(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setenv("JUDGE_RUN", str(folder))
    monkeypatch.setenv("JUDGE", "work:0")
    return folder


@pytest.fixture
def refused(capsys, place, run):
    """Runs the command on the tiny config and gives its error line."""

    def call(*arguments, config=None, command=main):
        if command is main:
            named = [] if "--resume" in arguments else ["--config", str(config or place.config)]
            arguments = [*named, "--run_dir", str(run), *arguments]
        assert command([str(argument) for argument in arguments]) == 2
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
        return captured.err.strip()

    return call


def test_a_missing_policy_is_found_before_data_and_rewards(refused, tmp_path):
    unread = ["--data.prompts", "no.jsonl", "--rewards", "no.py:f"]
    assert "nowhere" in refused("--policy.path", tmp_path / "nowhere", *unread)
    assert "has no config.json" in refused("--policy.path", tmp_path, *unread)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is a PEFT adapter: policy.lora.path takes it, and" in refused("--policy.path", tmp_path, *unread)


def test_a_failed_start_leaves_nothing_behind(refused, run, tmp_path):
    assert "nowhere" in refused("--policy.path", tmp_path / "nowhere")
    assert not run.exists()
    deep = tmp_path / "a" / "b" / "c"
    assert "nowhere" in refused("--policy.path", tmp_path / "nowhere", "--run_dir", deep)
    assert not (tmp_path / "a").exists()
    (run / "empty").mkdir(parents=True)
    for _ in range(2):  # a folder that was there stays, and is free for the next start
        assert "nowhere" in refused("--policy.path", tmp_path / "nowhere")
    assert (run / "empty").is_dir()


def test_a_run_that_was_killed_while_loading_may_start_again_in_its_folder(refused, run, tmp_path):
    run.mkdir()
    for name in ("config.yaml", "train.log", "run.lock"):
        (run / name).write_text("task: text\n")
    for _ in range(2):
        assert "nowhere" in refused("--policy.path", tmp_path / "nowhere")  # not: the folder is not empty


@pytest.fixture
def garbage(place, tmp_path):
    """A policy folder whose weights cannot be read: whoever complains about something else has not tried."""
    folder = shutil.copytree(place.policy, tmp_path / "garbage")
    (folder / "model.safetensors").write_bytes(b"garbage")
    return folder


PICTURES = ["--task", "prompt_enhancement", "--rewards", "[]", "--data.prompts", "builtin"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rewards", '[{"name": "{judge}:leters"}]'], "has no leters (it has: letters, brief)"),
        (["--rewards", '[{"name": "{judge}:brief", "options": {"size": 2}}]'], "the reward (it has none), got 'size'"),
        (["--rewards", '[{"name": "no_judge.py:f"}]'], "the file no_judge.py does not exist"),
        (["--data.prompts", "openai/gsm8k"], "from hub:openai/gsm8k, from reasoning_gym:NAME, or"),
        (["--data.prompts", "no.jsonl"], "no.jsonl does not exist"),
        (
            ["--rewards", "grpo_jax.rewards:numeric_answer", "--data.columns.answer", "wish"],
            "reward numeric_answer: 16 bad lines: row 2: the answer 'b' holds no single number",
        ),
        (["--training.prompts_per_batch", "12"], "a batch takes 12 different prompts and there are 8"),
        (["--policy.mesh.tensor", "4"], "takes 4 devices, but the policy has 1"),
        (["--devices.policy", "banana"], 'devices.policy: expected "auto", "cpu" or "gpu:N"'),
        ([*PICTURES, "--rewards", '[{"name": "beauty"}]'], "of this task alignment, alignment_gain, "),
        (
            [*PICTURES, "--rewards", '[{"name": "faithfulness", "options": {"margn": 0.5}}]'],
            "rewards.faithfulness.options: expected arguments of the reward (margin), got 'margn'",
        ),
        ([*PICTURES, "--rewards", '[{"name": "faithfulness", "options": {"margin": 7}}]'], "margin: expected a simil"),
        (
            [*PICTURES, "--rewards", '[{"name": "faithfulness", "messages": true}]'],
            "messages is for rewards of your own",
        ),
        ([*PICTURES, "--rewards", "geneval"], "reward geneval: no column fills its argument 'include'; the data has "),
        ([*PICTURES, "--judges.scorer.model", "./no_clip"], "no such folder: ./no_clip"),
        ([*PICTURES, "--eval_rewards", '["alignment@nobody"]'], "alignment@nobody: expected one of the judges ["),
        (
            [*PICTURES, "--judges.second", "open_clip", "--judges.second.model", "ViT-Z"],
            "scorer ViT-Z: neither a folder nor",
        ),
        (
            ["--task", "recommendation", "--data.prompts", "", "--rewards", '[{"name": "no_such_module:f"}]'],
            "no module no_such_module",
        ),
    ],
)
def test_mistakes_are_found_before_weights_are_read(refused, garbage, place, run, arguments, message):
    arguments = [argument.replace("{judge}", str(place.judge)) for argument in arguments]
    assert message in refused("--policy.path", garbage, *arguments)
    assert not run.exists()


def test_values_that_destroy_the_policy_or_train_nothing_are_warned_about(refused, garbage, place, capsys):
    arguments = ["--config", place.config, "--policy.path", garbage, "--run_dir", garbage.parent / "run"]
    arguments += ["--optimizer.learning_rate=1e4", "--rewards", f"[{{name: '{place.judge}:brief', weight: 0}}]"]
    assert main([*map(str, arguments)]) == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(lines) == 2 and "optimizer.learning_rate 10000: an update moves each weight by" in lines[0]
    assert "all weights of rewards are 0: no reward trains the policy" in lines[1]


def test_more_of_the_vocabulary_than_there_is(refused):
    assert "sampling.top_k: expected at most the policy's 272 tokens" in refused("--sampling.top_k", "273")
    assert "held-out prompts have no column 'kinds'" in refused("--evaluation.by", "kinds")


def test_mistakes_from_python_are_found_before_weights_are_read(garbage, place, run):
    config = parse([f"--config={place.config}", f"--policy.path={garbage}", f"--run_dir={run}"])
    named = config.replace(rewards=[RewardSection(name="missing_rewards:f")])
    with pytest.raises(UserError, match="reward 'missing_rewards:f': no module missing_rewards"):
        train(named)
    with pytest.raises(UserError, match="a batch takes 4 different prompts and there are 1"):
        train(config.replace(rewards=[]), prompts=["a", "b", "c"], rewards=[lambda completions: []])
    with pytest.raises(UserError, match="garbage"):
        train(config)
    assert not run.exists()


def test_debug_shows_the_traceback(place, run):
    with pytest.raises(UserError, match="/nowhere"):
        main([f"--config={place.config}", f"--run_dir={run}", "--policy.path=/nowhere", "--debug"])
