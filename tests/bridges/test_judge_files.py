"""Judges as a config has them: what they check before anything is read, what they load, what they say they take."""

import dataclasses
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("open_clip")

from safetensors.torch import save_file  # noqa: E402
from support import tiny_models  # noqa: E402

from bridges.diffusion import RenderSettings  # noqa: E402
from bridges.renderers.stable_diffusion_3 import StableDiffusion3  # noqa: E402
from bridges.scorers.open_clip import OpenClip  # noqa: E402
from grpo_jax.config import make_config, to_dict  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.planning.memory import judge_savings  # noqa: E402


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tiny_models.stable_diffusion_3(tmp_path_factory.mktemp("sd3"))
    return StableDiffusion3(path=str(folder), size=16, steps=1, eval_steps=2, guidance=3.0, batch_size=2)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return OpenClip(model=str(tiny_models.clip(tmp_path_factory.mktemp("clip"))))


def held(model) -> int:
    """Bytes of a model's weights, and of the buffers that are saved with them."""
    tensors = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}  # tied ones once
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def lines(judge) -> dict[str, int]:
    return {name: size for name, size, _ in judge.memory()}


def test_a_renderer_draws_with_the_settings_of_training_and_of_evaluation(renderer):
    loaded = renderer.load("cpu")
    shared = {"size": 16, "batch_size": 2}
    for evaluation, settings in ((False, RenderSettings(1, 3.0, **shared)), (True, RenderSettings(2, 1.0, **shared))):
        drawn = loaded.draw(["a red dog", "two cats"], [3, 5], evaluation=evaluation)
        assert torch.equal(drawn, loaded.render(["a red dog", "two cats"], [3, 5], settings))
    assert loaded.device == torch.device("cpu") and loaded.window == 256
    assert str(loaded) == f"{renderer.path}: Stable Diffusion 3, 1 step, window 256 tokens, on cpu"


def test_fields_reach_what_is_loaded(renderer):
    other = renderer.replace(use_t5=False, dtype="bfloat16", size=0, cache_megabytes=0).load("cpu")
    pipeline = other.pipeline
    assert pipeline.text_encoder_3 is None and other.window == 77
    assert {parameter.dtype for parameter in pipeline.transformer.parameters()} == {torch.bfloat16}
    assert other.training.size == other.evaluation.size == 8 * pipeline.vae_scale_factor
    first = other.render(["a"], [0], dataclasses.replace(other.training, size=16))
    assert other._cache.bytes == 0 and first.shape == (1, 3, 16, 16)


def test_a_scorer_is_its_model_with_the_head_that_it_names(scorer, tmp_path):
    loaded = scorer.load("cpu")
    assert str(loaded) == f"{scorer.model}: CLIP, features of 16, on cpu" and loaded.quality_head is None
    save_file({"weight": torch.ones(1, 16), "bias": torch.zeros(1)}, tmp_path / "head.safetensors")
    judged = scorer.replace(quality_head=str(tmp_path / "head.safetensors"), dtype="bfloat16").load("cpu")
    images = torch.rand(2, 3, 24, 24)
    torch.testing.assert_close(judged.quality(images), judged.image_features(images).sum(1))
    assert judged.model.text_projection.dtype == torch.bfloat16


@pytest.mark.parametrize("fields", [{}, {"use_t5": False}, {"dtype": "bfloat16"}], ids=["whole", "no T5", "bfloat16"])
def test_a_renderer_counts_the_weights_that_it_loads(renderer, fields):
    judge = renderer.replace(**fields)
    pipeline, found = judge.load("cpu").pipeline, lines(judge)
    encoders = [pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3]
    texts = sum(held(encoder) for encoder in encoders if encoder is not None)
    assert found["transformer and VAE"] == pytest.approx(held(pipeline.transformer) + held(pipeline.vae), rel=1e-3)
    assert found["text encoders"] == pytest.approx(texts, rel=1e-3)
    item = 2 if judge.dtype == "bfloat16" else 4
    assert found["drawing"] == 3 * 2 * 8 * 16 * 16 * item  # two pictures' features in the VAE's last block
    assert found["picture cache"] == 256 * 2**20


def test_a_scorer_counts_the_weights_that_it_loads(scorer):
    model = scorer.load("cpu").model
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert lines(scorer)["CLIP"] == pytest.approx(4 * weights, rel=1e-3)
    assert lines(scorer.replace(dtype="bfloat16"))["CLIP"] == lines(scorer)["CLIP"] / 2


def test_what_a_renderer_would_save_takes_less(renderer):
    """Each change is of fields that it has, and leaves less than what was changed before it."""
    sizes, judge = [sum(lines(renderer).values())], renderer
    for change in judge_savings(renderer).items():
        judge = judge.replace(**dict([change]))
        sizes.append(sum(lines(judge).values()))
    assert len(sizes) == 4 and sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4


def test_the_miniature_is_found_by_its_name():
    for judge in (StableDiffusion3(), OpenClip()):
        judge.check()
        assert sum(lines(judge).values()) > 0


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (StableDiffusion3(path="/nowhere/at/all"), "no such folder: /nowhere/at/all"),
        (OpenClip(model="ViT-Z-99"), "neither a folder nor a model that open_clip knows"),
        (OpenClip(model="ViT-B-32"), "say which weights in judges.scorer.pretrained"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_read(judge, message):
    with pytest.raises(UserError, match=message) as caught:
        judge.check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({"kind": "stable_diffusion_3", "steps": 0}, "judges.mine.steps: expected a number >= 1, got 0"),
        ({"kind": "stable_diffusion_3", "eval_guidance": 0.5}, "judges.mine.eval_guidance: expected a number >= 1"),
        ({"kind": "stable_diffusion_3", "size": -8}, "judges.mine.size: expected a number >= 0"),
        ({"kind": "stable_diffusion_3", "dtype": "float64"}, "judges.mine.dtype: expected 'float32', "),
        ({"kind": "open_clip", "modle": "x"}, "judges.mine.modle: no such field; did you mean judges.mine.model"),
        (
            "stable_diffusion",
            "judges.mine: no such kind, got 'stable_diffusion'; did you mean stable_diffusion_3",
        ),
        ("bridges.clip:Scorer", "judges.mine: bridges.clip has no task or judge called Scorer"),
    ],
)
def test_a_config_names_the_judge_and_the_field(judge, message):
    with pytest.raises(UserError, match=message):
        make_config(task="text", judges={"mine": judge})


def test_judges_are_values(renderer, scorer):
    """They compare, travel to other processes, and stand in a config as they are or as what YAML holds."""
    assert pickle.loads(pickle.dumps(renderer)) == renderer != StableDiffusion3()
    config = make_config(task="text", judges={"painter": renderer, "critic": scorer})
    plain = to_dict(config)["judges"]
    assert plain["painter"]["kind"] == "stable_diffusion_3" and plain["critic"]["kind"] == "open_clip"
    assert make_config(task="text", judges=plain).judges == {"painter": renderer, "critic": scorer}
