"""Training on prompts with pictures through the command: data, tower, sampler, update, resume, evaluation."""

import json

import jax
import numpy as np
import pyarrow.parquet
import pytest
import yaml
from support.rollouts import drawn
from support.text_task import assert_same_run, rewound, rows, train_here
from support.vision.folders import picture, seeing_folder, write_rows

from grpo_jax.config.command_line import load_config
from grpo_jax.core.losses import PRESETS, grpo_loss
from grpo_jax.rollout.rollout import collect
from grpo_jax.runs.evaluation import evaluate
from grpo_jax.runs.loading import load
from grpo_jax.runs.policy import restore_variables
from grpo_jax.training.objectives import make_forward

JUDGE = '''
import numpy as np

def bright(prompts, completions, image, images, pictures, wish, **columns):
    """Looks at the row's pictures, as TRL's users do; differs within every group."""
    assert all(one.size == (20, 12) for one in image) and images[0] == pictures[0] == [image[0]]
    light = [np.asarray(one).mean() / 255 for one in image]
    return [share + sum(map(ord, text + w)) % 17 for share, text, w in zip(light, completions, wish)]
'''
SIZE, GROUP = 4, 3


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A policy that sees, rows with a picture each, a reward that looks at them, and a config."""
    home = tmp_path_factory.mktemp("pictures")
    seeing_folder(home / "policy")
    write_rows(
        home / "data", [{"prompt": f"what is {i}?", "image": picture(i), "wish": "abc"[i % 3]} for i in range(9)]
    )
    (home / "judge.py").write_text(JUDGE)
    config = {
        "task": "text",
        "report_to": [],
        "policy": {"path": str(home / "policy"), "vision": "train", "remat": "none"},
        "data": {"prompts": str(home / "data" / "rows.jsonl"), "held_out": 0.2, "max_prompt_tokens": 160},
        "sampling": {"group_size": GROUP, "max_new_tokens": 6},
        "algorithm": {"kl_coef": 0.05},
        "optimizer": {"learning_rate": 0.01},
        "training": {"prompts_per_batch": SIZE, "max_steps": 2, "chunk_prompts": 2, "save_every": 1},
        "evaluation": {"every": 1, "samples": 0},
        "rewards": [{"name": f"{home}/judge.py:bright"}],
    }
    (home / "config.yaml").write_text(yaml.safe_dump(config))
    return home


@pytest.fixture(scope="module")
def run(home):
    assert train_here(home / "config.yaml", home / "run") == 0
    return home / "run"


@pytest.fixture(scope="module")
def ctx(home):
    return load(load_config(home / "config.yaml"), lambda *_: None)


def test_sampler_and_update_see_the_same(run):
    """A picture that is forgotten in one of them would show in the gap."""
    table = rows(run)
    assert len(table) == 2 and all(0 <= row["sampler_gap"] < 1e-5 and row["grad_norm"] > 0 for row in table)
    assert all(row["reward/bright/std"] > 0 and row["skipped_updates"] == 0 for row in table)


def test_a_tower_is_trained(run, home):
    import transformers
    from safetensors.numpy import load_file

    before, after = (load_file(folder / "policy" / "model.safetensors") for folder in (home, run))
    assert before.keys() == after.keys()
    names = [name for name in before if name.startswith("visual.") or "q_proj.weight" in name]
    assert len(names) > 9 and not any(np.array_equal(before[name], after[name]) for name in names)
    transformers.AutoModelForImageTextToText.from_pretrained(run / "policy")


def test_completions_and_report_show_the_picture(run, home):
    table = pyarrow.parquet.read_table(run / "completions" / "step_000001.parquet").to_pylist()
    assert len(table) == SIZE * GROUP
    for row in table:
        number = row["prompt"].removeprefix("what is ").removesuffix("?")
        assert row["pictures"] == [{"bytes": None, "path": str(home / "data" / f"{number}.png")}]
    assert 'alt="shown by the prompt"' in (run / "report.html").read_text()


@pytest.mark.wide
def test_a_resumed_run_equals_an_uninterrupted_run(run, tmp_path):
    again = rewound(run, tmp_path / "again", 1)
    assert train_here(run, again, "--resume") == 0
    assert_same_run(again, run)


def test_a_checkpoint_is_measured_and_asked(run, home, capsys, ctx):
    from grpo_jax import load_rewriter
    from grpo_jax.evaluate import main

    assert main(["--run", str(run), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    summary = json.loads((run / "summary.json").read_text())["evaluation"]
    assert measured["greedy"]["bright"] == pytest.approx(summary["bright"]["after"], abs=1e-6)
    assert measured["greedy"]["bright"] > 0  # the light of the pictures at least
    variables, _ = restore_variables(ctx.policy.variables, run, "final", {})
    written = [one.last.completion for one in evaluate(ctx, variables, ctx.test_rows).episodes]
    rewrite = load_rewriter(run)
    for row, text in zip(ctx.test_rows, written, strict=True):
        assert rewrite(row.prompt, pictures=[row.pictures[0].path]) == text
    assert isinstance(rewrite("what is this?"), str)


@pytest.mark.parametrize(
    ("architecture", "vision"), [("qwen2_vl", "frozen"), pytest.param("qwen3_vl", "train", marks=pytest.mark.wide)]
)
def test_swapped_pictures_change_log_probabilities_and_loss(architecture, vision, home, tmp_path):
    config = yaml.safe_load((home / "config.yaml").read_text())
    config["policy"] = {"path": str(seeing_folder(tmp_path / "policy", architecture)), "vision": vision}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    ctx = load(load_config(tmp_path / "config.yaml"), lambda *_: None)
    _, batch = drawn(ctx, ctx.policy.variables)
    # frozen: what the sampler was shown; trained: patches, so that the update sees them with gradient
    kind = {"frozen": "PictureStates", "train": "Pictures"}[vision]
    (pictures,) = batch.pictures.values()
    assert type(pictures).__name__ == kind and pictures.grid.shape == (SIZE, 1, 2)
    forward = jax.jit(make_forward(ctx.policy, temperature=1.0, allowed_tokens=ctx.allowed_tokens))
    mask = np.asarray(batch.mask)

    def logprobs(pictures):
        return np.asarray(forward(ctx.policy.variables, batch._replace(pictures=pictures)).logprobs)

    def loss(new):
        return float(grpo_loss(new, batch.rollout_logprobs, advantages, mask, **PRESETS["grpo"])[0])

    advantages = np.random.default_rng(0).normal(size=mask.shape[:2]).astype(np.float32)
    own, swapped = logprobs(batch.pictures), logprobs(jax.tree.map(lambda array: array[::-1], batch.pictures))
    np.testing.assert_allclose(own[mask], np.asarray(batch.rollout_logprobs)[mask], atol=1e-5)
    change = np.abs(swapped - own)[mask]
    assert change.max() > 1e-3 and (change > 1e-6).mean() > 0.9 and abs(loss(swapped) - loss(own)) > 1e-5
    # Forgotten altogether it would be seen in metrics (`sampler_gap`).
    assert np.abs(logprobs({}) - own)[mask].mean() > 1e-4


def test_placeholders_are_never_sampled(ctx):
    """What policies sample there has no picture behind it, and the counts of a next turn no longer fit."""
    vision = ctx.policy.config.vision
    tokens = [vision.image_token, vision.vision_start_token, vision.vision_end_token, vision.video_token]
    assert not ctx.allowed_tokens[tokens].any() and ctx.allowed_tokens.sum() == len(ctx.allowed_tokens) - 4
    params = dict(ctx.policy.variables["params"])
    head = np.array(params["lm_head"])
    head[tokens] *= 1e4  # a policy that wants nothing else
    variables = ctx.policy.variables | {"params": params | {"lm_head": head}}
    prompts = ctx.task_data.prompts.train[:2]
    rollout = collect(ctx.fns, ctx.samplers.training, variables, prompts, key=ctx.key, iteration=0)
    assert not np.isin(rollout.samples.tokens[rollout.samples.mask], tokens).any()


def test_a_picture_that_breaks_off_is_one_line(home, tmp_path, capsys):
    """Its header is sound: that it is broken shows when it is read."""
    pictures = [picture(i) for i in range(9)]
    data = write_rows(
        tmp_path / "data", [{"prompt": f"what is {i}?", "image": one, "wish": "a"} for i, one in enumerate(pictures)]
    )
    for path in data.parent.glob("*.png"):
        path.write_bytes(path.read_bytes()[:200])
    assert train_here(home / "config.yaml", tmp_path / "run", f"--data.prompts={data}") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ") and ".png: it is broken (" in line and "row " in line
