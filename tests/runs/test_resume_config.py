"""Changes allowed on resume: memory, paths, length of training; not learning."""

import importlib
import json
import shutil

import numpy as np
import pytest
import yaml
from support.text_task import SHORT, finished_run, rewound, rows, train_here, train_values
from support.tiny_models import causal_lm

from grpo_jax import evaluate, export, predict
from grpo_jax.config.run import make_config
from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.reward_registry import ResolvedRewards
from grpo_jax.runs.checkpoint import read_manifest, write_manifest
from grpo_jax.runs.loading import code_identity
from grpo_jax.runs.policy import make_new_policy
from grpo_jax.tasks.task import Vocabulary

JUDGE = '''
from grpo_jax import Judge
from grpo_jax.config.fields import resume_mutable

class Letters(Judge):
    """Counts letters."""

    share: float = 0.125
    """What a letter counts."""
    batch_size: int = resume_mutable(4)
    """Texts at once."""
    path: str = ""
    """A file of weights, as judges of the package have."""

    def load(self, device):
        return self

def letters(completions, *, own):
    return [own.share * sum(c.isalpha() for c in text) for text in completions]
'''


@pytest.fixture(scope="module")
def config(place, tmp_path_factory):
    """The tiny task with a judge of its own, otherwise as `SHORT`."""
    folder = tmp_path_factory.mktemp("resumed")
    (folder / "own.py").write_text(JUDGE)
    values = yaml.safe_load(place.config.read_text())
    values["judges"] = {"own": f"{folder / 'own.py'}:Letters"}
    values["rewards"] = [{"name": f"{folder / 'own.py'}:letters"}]
    values["algorithm"] = {}
    values["training"] |= {"max_steps": 2, "save_every": 1, "minibatches": 1, "inner_epochs": 1}
    values["optimizer"]["schedule"] = "constant"
    values["data"]["held_out"] = 0
    values["evaluation"] = {"every": 0, "samples": 0}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def finished(config):
    run = config.parent / "run"
    assert train_here(config, run) == 0
    return run


def test_memory_settings_and_places_may_change(config, finished, tmp_path, capsys):
    run = rewound(finished, tmp_path / "run", 1)
    other = {
        "training.grad_accumulation_steps": 2, "training.chunk_prompts": 2,
        "training.save_every": 1, "training.keep_checkpoints": 1, "policy.remat": "layer", "devices.policy": "cpu",
        "judges.own.batch_size": 1, "judge_timeout": 60, "on_judge_error": "missing",
    }  # fmt: skip
    assert train_here(config, run, "--resume", *(f"--{name}={value}" for name, value in other.items())) == 0
    out = capsys.readouterr().out
    assert "resumed after iteration 1 of 2" in out and "have changed" not in out
    for mine, theirs in zip(rows(run), rows(finished), strict=True):
        assert mine.keys() == theirs.keys()
        np.testing.assert_allclose(*([v or 0.0 for v in row.values()] for row in (mine, theirs)), rtol=1e-3, atol=1e-4)
    saved = yaml.safe_load((run / "config.yaml").read_text())  # the next resume starts from what was said
    assert saved["training"]["grad_accumulation_steps"] == 2 and saved["judges"]["own"]["batch_size"] == 1
    assert sorted(path.name for path in (run / "checkpoints").glob("[sf]*")) == ["final", "step_2"]


def test_fields_that_change_learning_are_refused_by_name(config, finished, tmp_path, capsys):
    run = rewound(finished, tmp_path / "run", 1)
    before = (run / "metrics.jsonl").read_bytes()
    other = {
        "optimizer.learning_rate": 0.5, "algorithm.clip_high": 0.3, "seed": 4, "judges.own.share": 1.0,
        "training.grad_accumulation_steps": 2, "sampling": '{"group_size": 2, "top_k": 3}',
    }  # fmt: skip
    assert train_here(config, run, "--resume", *(f"--{name}={value}" for name, value in other.items())) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --resume: the checkpoint in {run / 'checkpoints'} was made with other values (")
    assert error.count("\n") == 1 and "grad_accumulation_steps" not in error
    told = error[error.index("(") + 1 : error.index("): give those again")].split("; ")
    assert sorted(told) == [
        "algorithm.clip_high: None → 0.3",
        "judges.own.share: 0.125 → 1.0",
        "optimizer.learning_rate: 0.01 → 0.5",
        "sampling.group_size: 4 → 2",
        "sampling.top_k: 0 → 3",
        "seed: 3 → 4",
    ]
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_may_be_made_longer_and_not_shorter_than_it_is(place, tmp_path, capsys):
    run = rewound(finished_run(place), tmp_path / "run", 6)
    assert train_here(place.config, run, "--resume", "--training.max_steps=5") == 2
    assert capsys.readouterr().err == "error: --resume: 6 iterations are done, more than the run's 5\n"
    (run / "checkpoints").rename(tmp_path / "away")  # by somebody who needs room
    assert train_here(place.config, run, "--resume", "--training.max_steps=7") == 2
    assert f"{run / 'checkpoints'} has no checkpoint, though 6 iterations are done: put" in capsys.readouterr().err
    assert (run / "policy/model.safetensors").is_file() and len(rows(run)) == 6
    (run / "checkpoints").rmdir()
    (tmp_path / "away").rename(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    assert train_here(place.config, run, "--resume", "--training.max_steps=7") == 0
    out = capsys.readouterr().out
    assert "the run has 7 iterations now, it had 6: schedules use the new length" in out
    assert "warning: metrics.jsonl has 0 rows of 6 iterations: missing rows stay missing" in out
    (row,) = rows(run)
    # The 25th of 28 updates of a cosine, behind a warm-up of 3; in a run of 24 it would be 0.
    assert row["step"] == 7 and row["learning_rate"] == pytest.approx(0.005 * (1 + np.cos(np.pi * 21 / 25)), rel=1e-5)
    assert json.loads((run / "summary.json").read_text())["iterations"] == 7


def test_changed_held_out_rows_and_judges_are_refused_and_changed_training_rows_are_noted(config, tmp_path, capsys):
    def write(name, records):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    train = [{"prompt": f"{c} tree", "answer": c} for c in "abcdefgh"]
    held_out = [{"prompt": f"{c} tree", "answer": c} for c in "wxyz"]
    write("p.jsonl", train)
    write("t.jsonl", held_out)
    run = tmp_path / "run"
    words = [f"--data.prompts={tmp_path}/p.jsonl", f"--data.test={tmp_path}/t.jsonl", "--training.max_steps=1", *SHORT]
    weights = tmp_path / "weights"
    weights.write_text("these")
    assert train_here(config, run, *words, f"--judges.own.path={weights}") == 0

    def assert_refused(reason):
        capsys.readouterr()
        for refused in (
            lambda: train_here(config, run, "--resume", "--training.max_steps=2"),
            lambda: evaluate.main(["--run", str(run)]),
        ):
            assert refused() == 2
            (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
            assert f"made with other data or models ({reason}" in line

    write("t.jsonl", [held_out[0] | {"answer": "y"}, *held_out[1:]])
    assert_refused("test rows: 4 of digest")
    write("t.jsonl", held_out)
    weights.write_text("those")
    assert_refused("weights of judges.own.path: ")
    weights.write_text("these")
    write("p.jsonl", [*train, {"prompt": "i tree", "answer": "i"}])
    code = config.parent / "own.py"
    code.write_text(JUDGE + "# another version")
    assert train_here(config, run, "--resume", "--training.max_steps=2") == 0
    code.write_text(JUDGE)
    out = capsys.readouterr().out
    assert "warning: the training rows have changed: 8 of digest" in out
    assert "warning: the files of user code have changed: " in out
    assert evaluate.main(["--run", str(run)]) == 0


def test_another_base_or_teacher_of_the_same_shapes_is_refused(config, tmp_path, capsys):
    """The checkpoints of a LoRA run lack both; one that was written before they had digests is accepted."""
    values = yaml.safe_load(config.read_text())
    base, other, teacher = (causal_lm(tmp_path / str(seed), seed=seed, num_hidden_layers=1) for seed in range(3))
    values["policy"] |= {"path": str(base), "lora": {"rank": 2}}
    values["algorithm"] = {"advantage": "opd", "preset": "bnpo", "teacher": str(teacher)}
    values["data"]["held_out"], values["evaluation"]["prompts"] = 0.25, 1
    values["optimizer"]["schedule"] = "constant"  # the longer run has the same programs
    run, resumed = tmp_path / "run", ["--resume", "--training.max_steps=2"]
    train_values(values, run, "--training.max_steps=1", judge="work:0")
    commands = {
        "resume": lambda: train_here(config, run, *resumed),
        "evaluate": lambda: evaluate.main(["--run", str(run)]),
        "export": lambda: export.main(["--run", str(run), "--out", str(tmp_path / "out")]),
        "predict": lambda: predict.main(["--run", str(run), "--prompt", "a"]),
    }
    for folder, field, names in ((base, "policy.path", commands), (teacher, "algorithm.teacher", ["resume"])):
        file, kept = folder / "model.safetensors", tmp_path / "kept"
        file.rename(kept)
        shutil.copy(other / file.name, file)
        for name in names:
            capsys.readouterr()
            assert commands[name]() == 2
            (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
            assert f"{run / 'checkpoints'} was made with other data or models (weights of {field}: " in line, name
        kept.rename(file)
    settings = base / "tokenizer_config.json"
    text = settings.read_text()
    settings.write_text(text + "\n")
    for name in ("resume", "predict"):
        assert commands[name]() == 2
        assert "other data or models (config and tokenizer of policy.path: " in capsys.readouterr().err, name
    settings.write_text(text)
    assert commands["evaluate"]() == commands["predict"]() == 0
    content = read_manifest(run / "checkpoints" / "step_1")
    task = content["meta"]["progress"]["identity"]["task"]
    names = "weights of policy.path", "weights of algorithm.teacher", "config and tokenizer of policy.path"
    assert [task.pop(name) for name in names]
    write_manifest(run / "checkpoints" / "step_1", content)
    assert commands["resume"]() == 0


def test_a_resume_before_the_first_checkpoint_makes_its_new_policy_again(tmp_path):
    """Its fields may have changed since a run that was stopped in its supervised updates."""
    vocabulary, folder = Vocabulary(lambda: ["a", "tree"]), tmp_path / "policy_start"

    def width(checkpoints, **changes):
        new = {"width": changes.pop("width", 8), "layers": 1, "heads": 2}
        values = {"task": "recommendation", "run_dir": str(tmp_path), "policy": {"path": "new", "new": new}}
        for step in checkpoints:
            (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
        make_new_policy(make_config(values | changes), vocabulary)
        return json.loads((folder / "config.json").read_text())["hidden_size"]

    assert [width([]), width([], width=16), width([], width=16, resume=True)] == [8, 8, 16]
    assert width([0], width=32, resume=True) == 16


def test_every_file_of_user_code_is_part_of_the_identity(tmp_path, monkeypatch):
    """Also that of an environment, and modules that are named without their file."""
    monkeypatch.syspath_prepend(tmp_path)
    env, module = tmp_path / "env.py", tmp_path / "own_named_module.py"
    env.write_text("class Env: pass\n"), module.write_text("def f(completions): pass\n")
    importlib.import_module("own_named_module")
    config = make_config(task={"kind": "environment", "environment": {"a": f"{env}:Env"}})
    named = ResolvedRewards((RewardSection(name="own_named_module:f"),), (), (), ("grpo_jax.rewards:exact_match",))
    alone = named._replace(sections=())
    digests = [code_identity(config, rewards) for rewards in (alone, named)]
    env.write_text("class Env: other = 1\n")
    digests += [code_identity(config, rewards) for rewards in (alone, named)]
    module.write_text("def f(completions): return 1\n")
    digests += [code_identity(config, named)]
    assert len({digest["files of user code"] for digest in digests}) == 5
    assert not code_identity(make_config(task="text"), alone)
