"""A renderer that learns with the policy, through the commands; and the parts that decide what it learns."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("diffusers")
pytest.importorskip("peft")
from diffusers import StableDiffusion3Pipeline
from faults.runs import differences, outcome_of
from PIL import Image
from safetensors.torch import load_file

from bridges import bundled
from grpo_jax import evaluate, export, predict, train
from grpo_jax.config.run import make_config
from grpo_jax.rollout.data import Row, noise_seed
from grpo_jax.rollout.pictures import RenderedImages
from grpo_jax.rollout.rewards import Score
from grpo_jax.rollout.rollout import RolloutFns, judge
from grpo_jax.runs.directory import read_metrics
from grpo_jax.tasks import pictures as picture_tasks
from grpo_jax.tasks.renderer import noise_seeds, picture_advantages

LEARNS = {"train": {"lora": {"rank": 2, "alpha": 4.0}, "learning_rate": 2.0e-3}}
MEASURE = "pixel_accuracy_of_captions"


def config_of(renderer=LEARNS, **more):
    return make_config({"task": "prompt_enhancement", "judges": {"renderer": renderer}}, **more)


@pytest.fixture(scope="module", autouse=True)
def few_prompts():
    """A run reads all of them before it begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picture_tasks, "TRAINING_PROMPTS", 32)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two iterations in which both models learn, with two pictures of each text."""
    run_dir = tmp_path_factory.mktemp("runs") / "joint"
    small = ["--training.prompts_per_batch=2", "--sampling.group_size=2", "--training.inner_epochs=1"]
    small += ["--training.max_steps=2", "--training.save_every=1", "--report_to="]
    small += ["--optimizer.schedule=constant"]  # a longer run then has the same programs
    held_out = ["--evaluation.prompts=2", "--evaluation.validation_prompts=2", "--evaluation.every=2"]
    learns = [f"--judges.renderer.train={json.dumps(LEARNS['train'])}", "--judges.renderer.pictures=2"]
    learns += ["--judges.renderer.steps=2", "--judges.renderer.eval_steps=2", "--evaluation.samples=0"]
    arguments = ["--config=prompt_enhancement_scenes", *small, *held_out, *learns, f"--run_dir={run_dir}"]
    assert train.main(arguments) == 0
    return run_dir


def test_metrics_and_report_have_the_renderers_part(run):
    rows = read_metrics(run / "metrics.jsonl")
    for row in rows:
        assert row["renderer/grad_norm"] > 0 and row["seconds/renderer"] > 0
    assert [MEASURE in " ".join(row) for row in rows] == [False, True]
    summary = json.loads((run / "summary.json").read_text())
    assert {"start_renderer", "oracle_before"} <= summary["evaluation"]["alignment"].keys()
    pictures = [np.asarray(Image.open(run / "images" / f"000_{name}.png")) for name in ("between", "after")]
    assert not np.array_equal(*pictures)
    assert "untrained renderer" in (run / "report.html").read_text()
    assert "learns from rewards with the argument images: alignment\n" in (run / "train.log").read_text()


def test_with_learns_renderer_the_policy_stays_as_it_was(run, tmp_path):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["training"] |= {"learns": "renderer", "max_steps": 1, "save_every": 0}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert train.main([f"--config={tmp_path / 'config.yaml'}", f"--run_dir={tmp_path / 'run'}"]) == 0
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["renderer/grad_norm"] > 0 and "grad_norm" not in row
    start, end = (
        load_file(folder / "model.safetensors")
        for folder in (bundled("miniature_scenes", "policy"), tmp_path / "run" / "policy")
    )
    assert all(torch.equal(end[name].float(), start[name].float()) for name in start)


def test_a_killed_run_continues_bit_for_bit(run, tmp_path):
    killed = tmp_path / "killed"
    shutil.copytree(run, killed, symlinks=True)
    (killed / "summary.json").unlink()
    shutil.rmtree(killed / "checkpoints" / "step_2")
    for name in ("best", "final"):
        (killed / "checkpoints" / name).unlink(missing_ok=True)
    assert train.main(["--resume", f"--run_dir={killed}"]) == 0
    came, expected = outcome_of(killed), outcome_of(run)
    came.pop("best"), expected.pop("best")  # this one may be that of step 2 alone
    assert not differences(came, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_run_stops_if_no_update_of_its_renderer_is_finite(run, tmp_path, capsys):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["judges"]["renderer"]["train"]["beta"] = 1e-39  # 1 / beta is infinite in float32
    config["training"] |= {"max_steps": 9, "save_every": 0}
    config["evaluation"]["every"] = 0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    for count, arguments in ((3, [f"--config={tmp_path / 'config.yaml'}"]), (4, ["--resume"])):
        assert train.main([*arguments, f"--run_dir={tmp_path / 'run'}"]) == 2
        error = capsys.readouterr().err
        assert f"error: the renderer's loss or its gradient was not finite in {count} updates in a row" in error
        assert "a lower judges.renderer.train.learning_rate" in error and error.count("\n") == 1
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [row["renderer/skipped"] for row in rows] == [1] * count


def test_evaluate_draws_with_the_trained_renderer(run, tmp_path):
    out = tmp_path / "out.json"
    assert evaluate.main(["--run", str(run), "--json", "--out", str(out)]) == 0
    expected = json.loads((run / "summary.json").read_text())["evaluation"]["alignment"]
    came = json.loads(out.read_text())
    assert came["greedy"]["alignment"] == expected["after"] != expected["start_renderer"]
    assert came["start_renderer"]["alignment"] == expected["start_renderer"]
    assert came["oracle"]["alignment"] == expected["oracle"] != expected["oracle_before"]


def test_exported_weights_draw_the_runs_pictures_in_diffusers(run, tmp_path, capsys):
    assert export.main(["--run", str(run), "--out", str(tmp_path / "lora"), "--renderer"]) == 0
    assert "load_lora_weights" in capsys.readouterr().out
    prompt = "two small red rings"
    drawn = tmp_path / "drawn"
    assert predict.main(["--run", str(run), "--prompt", prompt, "--pictures", str(drawn)]) == 0
    text = capsys.readouterr().out.strip()
    folder, without_t5 = bundled("miniature_scenes", "renderer"), {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32, **without_t5)
    pipeline.set_progress_bar_config(disable=True)
    arguments = {"prompt": text, "num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 1}
    seed = noise_seed(0, 0, 1, evaluation=True)

    def draw():
        generator = torch.Generator().manual_seed(seed)
        return np.asarray(pipeline(**arguments, height=32, width=32, generator=generator).images[0], np.int32)

    ours, before = np.asarray(Image.open(drawn / "0.png"), np.int32), draw()
    pipeline.load_lora_weights(tmp_path / "lora")
    assert np.abs(draw() - ours).max() <= 1 < np.abs(before - ours).max()
    on_lora = tmp_path / "on_lora"  # the run of a renderer with LoRA weights merged into it
    shutil.copytree(run, on_lora, symlinks=True)
    config = yaml.safe_load((run / "config.yaml").read_text())
    fields = {name: value for name, value in config["judges"]["renderer"].items() if name not in ("kind", "use_t5")}
    config["judges"]["renderer"] = fields | {"kind": "text_to_image", "lora": str(tmp_path / "lora")}
    (on_lora / "config.yaml").write_text(yaml.safe_dump(config))
    assert export.main(["--run", str(on_lora), "--out", str(tmp_path / "second"), "--renderer"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()[2:]]
    pipeline.unload_lora_weights()
    exec("\n".join(lines), {"pipeline": pipeline})
    assert [lines[0], lines[-1]] == [f'pipeline.load_lora_weights("{tmp_path / name}")' for name in ("lora", "second")]
    assert np.abs(draw() - ours).max() > 1  # both act


@pytest.mark.parametrize("by_text", [False, True])
@pytest.mark.parametrize("scale", ["batch", "group"])
def test_advantages_compare_pictures_of_a_prompt_or_of_a_text(by_text, scale):
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(3, 6, 2)).astype(np.float32)
    rewards[0, 1] = rewards[2, 3, 0] = np.nan
    texts = [["a", "a", "b", "b", "b", "c"], ["a"] * 6, list("abcdef")]
    weights = (1.0, 0.5)
    expected = np.where(np.isnan(rewards).all(-1), np.nan, 0.0)
    for n, weight in enumerate(weights):
        deviation = np.nanstd(rewards[..., n], ddof=1)
        for p, i in np.ndindex(3, 6):
            others = [j for j in range(6) if texts[p][j] == texts[p][i] or not by_text]
            values = rewards[p, others, n]
            values = values[~np.isnan(values)]
            if len(values) > 1 and not np.isnan(rewards[p, i, n]):
                std = deviation if scale == "batch" else values.std(ddof=1)
                expected[p, i] += weight / 1.5 * (rewards[p, i, n] - values.mean()) / (std + 1e-4)
    came = picture_advantages(rewards, texts, weights=weights, by_text=by_text, scale=scale)
    np.testing.assert_allclose(came, expected, rtol=2e-4, atol=2e-5)


def test_a_texts_reward_is_the_mean_over_its_pictures():
    def number(completions, images, log_extra, **columns):
        values = images[:, 0, 0, 0].tolist()
        log_extra("picture", values)
        return [None if value in (1, 6, 7) else value for value in values]

    pictures = np.broadcast_to(np.arange(8, dtype=np.uint8)[:, None, None, None], (8, 4, 4, 3))
    drawn = RenderedImages(pictures, None, per_text=2)
    fns = RolloutFns(None, None, lambda *_: drawn, Score({"number": number}, {}, missing=False), ("number",), ())
    rollout = judge(fns, [Row(1, "a"), Row(2, "b")], [["x", "y"], ["z", "z"]])
    np.testing.assert_array_equal(rollout.final_rewards[..., 0], [[0, 2.5], [4.5, np.nan]])
    turns = [episode.last for group in rollout.episodes for episode in group]
    expected = [[0, np.nan], [2, 3], [4, 5], [np.nan, np.nan]]
    np.testing.assert_array_equal([turn.picture_rewards[:, 0] for turn in turns], expected)
    assert [turn.logged["log/picture"] for turn in turns] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_noise_is_shared_by_words_and_new_for_copies_where_the_renderer_learns():
    rows, starts = [Row(3, "a"), Row(7, "b")], [noise_seed(0, 5, 3), noise_seed(0, 5, 7)]
    drawn = {"rows": rows, "texts": [["x", "y", "x"], ["z", "z", "z"]], "iteration": 5, "evaluation": False}
    places = {"one": ([0, 0, 0], [0, 0, 0]), "two": ([0, 1] * 3, [0, 1] * 3)}
    places |= {"learns": ([0, 0, 1], [0, 1, 2]), "learns from two": ([0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5])}
    renderers = {"one": {}, "two": {"pictures": 2}, "learns": LEARNS, "learns from two": LEARNS | {"pictures": 2}}
    for name, renderer in renderers.items():
        expected = [start + place for start, row in zip(starts, places[name], strict=True) for place in row]
        assert noise_seeds(config_of(renderer), **drawn) == expected, name
        held_out = [noise_seed(0, 0, row.id, evaluation=True) for row in rows for _ in range(3)]
        assert noise_seeds(config_of(renderer), **drawn | {"evaluation": True}) == held_out


REFUSED = {
    "pool": ({"pool": {"replicas": 1}}, {}, "judges.renderer.pool"),
    "guidance": ({"guidance": 4.5}, {}, "guidance"),
    "ahead": ({}, {"training": {"async_level": 1}}, "training.async_level"),
    "without settings": ({"train": None}, {"training": {"learns": "renderer"}}, "training.learns"),
    "a task of texts": (None, {"training": {"learns": "both"}, "task": "text"}, "training.learns"),
}


@pytest.mark.parametrize(("renderer", "values", "field"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(renderer, values, field, tmp_path, capsys):
    judges = {} if renderer is None else {"judges": {"renderer": LEARNS | renderer}}
    path = tmp_path / "config.json"
    parts = {"policy": {"path": "miniature_scenes"}, "data": {"prompts": "miniature_scenes"}}
    path.write_text(json.dumps({"task": "prompt_enhancement", **parts, **judges, **values}))
    assert train.main([f"--config={path}", f"--run_dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: {field}: expected") and "\n" not in error


def test_a_task_of_several_turns_trains_no_renderer(tmp_path, capsys):
    arguments = ["--config=prompt_refinement_miniature", "--judges.renderer.kind=stable_diffusion_3"]
    learns = f"--judges.renderer.train={json.dumps(LEARNS['train'])}"
    assert train.main([*arguments, learns, f"--run_dir={tmp_path / 'run'}"]) == 2
    assert "error: training.learns: expected 'rewriter'" in capsys.readouterr().err
