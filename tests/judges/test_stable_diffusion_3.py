"""The renderer against diffusers itself: pictures, text window, errors."""

import json
import shutil
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers import StableDiffusion3Pipeline  # noqa: E402
from support import tiny_models  # noqa: E402

from bridges.diffusion import RenderError  # noqa: E402
from bridges.judges import RenderSettings  # noqa: E402
from bridges.judges.stable_diffusion_3 import StableDiffusion3  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402

PROMPTS = ["a red dog", "two cats", "a dog of red"]
SEEDS = [3, 2**40, 5]
SETTINGS = RenderSettings(steps=2, guidance=3.0, size=16, batch_size=3)


def load_renderer(folder, **fields):
    return StableDiffusion3(path=str(folder), **fields).load("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.stable_diffusion_3(tmp_path_factory.mktemp("sd3"))


@pytest.fixture(scope="module")
def folder_without_t5(tmp_path_factory):
    return tiny_models.stable_diffusion_3(tmp_path_factory.mktemp("sd3"), t5=False)


@pytest.fixture(scope="module")
def renderer(folder):
    return load_renderer(folder)


@pytest.fixture
def counted(renderer, monkeypatch):
    """The prompts of each call of the pipeline, on an empty cache."""
    calls = []
    kind = type(renderer.pipeline)
    draw = kind.__call__

    def record(pipeline, **kwargs):
        calls.append(kwargs["prompt"])
        return draw(pipeline, **kwargs)

    monkeypatch.setattr(kind, "__call__", record)
    monkeypatch.setattr(renderer, "_workers", 1)  # batches in order
    monkeypatch.setattr(renderer, "_cache", type(renderer._cache)(2**20))
    return calls


def from_diffusers(folder, prompts, seeds, *, guidance, **kwargs):
    parts = {} if kwargs.pop("t5", True) else {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompts,
        negative_prompt="",
        guidance_scale=guidance,
        num_inference_steps=2,
        height=16,
        width=16,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="pt",
        **kwargs,
    ).images


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_pictures_are_those_of_diffusers(folder, renderer, guidance):
    settings = RenderSettings(steps=2, guidance=guidance, size=16, batch_size=3)
    images = renderer.render(PROMPTS, SEEDS, settings)
    expected = from_diffusers(folder, PROMPTS, SEEDS, guidance=guidance)
    assert images.shape == (3, 3, 16, 16)
    assert images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
    assert (images[0] - images[2]).abs().max() > 1e-3  # or the comparison would show nothing


def test_pictures_without_t5_are_those_of_diffusers(folder):
    images = load_renderer(folder, use_t5=False).render(PROMPTS, SEEDS, SETTINGS)
    expected = from_diffusers(folder, PROMPTS, SEEDS, guidance=3.0, t5=False)
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


def test_window_and_token_counts(folder, renderer):
    assert renderer.window == 256
    clip_only = load_renderer(folder, use_t5=False)
    assert clip_only.window == 77
    texts = ["", "red dog", "x y z", "q " * 100]
    assert clip_only.count_tokens(texts) == [2, 4, 5, 102]  # start and end included
    assert renderer.count_tokens(texts) == [1, 7, 4, 101]  # T5: letters and the end
    assert clip_only.count_tokens([]) == []


def test_a_picture_is_drawn_once_for_all_that_it_depends_on(renderer, counted):
    settings = RenderSettings(steps=1, guidance=1.0, size=16, batch_size=2)
    images = renderer.render(["a", "b", "a", "c", "a"], [0, 0, 0, 0, 1], settings)
    assert counted == [["a", "b"], ["c", "a"]]
    assert torch.equal(images[0], images[2]) and not torch.equal(images[0], images[4])
    renderer.render(["d"], [0], settings)
    assert counted.pop() == ["d", "d"] and len(counted) == 2
    counted.clear()
    first = renderer.render(["a"], [0], SETTINGS)
    first_copy = first.clone()
    first.zero_()  # what a caller does to his pictures must not reach the cache
    assert torch.equal(renderer.render(["a"], [0], SETTINGS), first_copy)
    assert len(counted) == 1
    renderer.render(["a"], [1], SETTINGS)
    renderer.render(["b"], [0], SETTINGS)
    assert len(counted) == 3
    for change in ({"steps": 3}, {"guidance": 4.0}, {"size": 32}):
        renderer.render(["a"], [0], replace(SETTINGS, **change))
    assert len(counted) == 6


def test_a_pipeline_that_raises_is_named(renderer, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("CUDA out of memory\nand much more")

    monkeypatch.setattr(renderer.pipeline.vae, "decode", fail)
    with pytest.raises(RenderError, match=r"failed: RuntimeError: CUDA out of memory$"):
        renderer.render(["never drawn before"], [0], SETTINGS)
    with pytest.raises(RenderError, match=r"failed: ValueError: .*divisible by"):
        renderer.render(["a"], [0], RenderSettings(steps=1, guidance=1.0, size=17))


def test_folders_that_are_missing_or_other(tmp_path, folder):
    with pytest.raises(UserError, match="no such folder"):
        load_renderer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"model_index\.json"):
        load_renderer(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(UserError, match="expected a StableDiffusion3Pipeline, got"):
        load_renderer(other)
    with pytest.raises(UserError, match="dtype"):
        load_renderer(folder, dtype="float64")


def test_broken_weights(tmp_path, folder):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (weights,) = (copy / "text_encoder").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot load the renderer") as caught:
        load_renderer(copy)
    assert "\n" not in str(caught.value)


def test_weights_that_need_a_login():
    with pytest.raises(UserError, match="hf auth login") as caught:
        load_renderer("stabilityai/stable-diffusion-3-medium-diffusers")
    assert "\n" not in str(caught.value)


def test_counting_tokens_does_not_disturb_a_rendering_thread(folder_without_t5):
    """A fast tokenizer keeps padding and truncation from its last call: counting must have tokenizers of its own."""
    renderer = load_renderer(folder_without_t5, cache_megabytes=0)
    pipeline = renderer.pipeline
    fast = [tokenizer._tokenizer for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2)]
    texts = ["a", "two cats of red", "a dog " * 60]
    for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2):  # as the pipeline calls them
        tokenizer(texts, padding="max_length", truncation=True, max_length=77)
    settings = [(one.truncation, one.padding) for one in fast]
    assert all(truncation and padding for truncation, padding in settings)  # or the comparison would show nothing
    renderer.count_tokens(["a red dog", "two cats and a very long tail of words " * 20])
    assert [(one.truncation, one.padding) for one in fast] == settings
    assert not {id(counter._tokenizer) for counter in renderer._counters} & set(map(id, fast))


def held(model) -> int:
    """Bytes of a model's weights, and of the buffers that are saved with them."""
    tensors = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}  # tied ones once
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.fixture
def judge(folder):
    return StableDiffusion3(
        path=str(folder), size=16, steps=1, eval_steps=2, guidance=3.0, eval_guidance=1.0, batch_size=2
    )


def test_evaluation_draws_as_training_unless_it_has_settings_of_its_own():
    """With 10 steps and no guidance, held-out prompts were measured by other pictures than the run trains on."""
    judge = StableDiffusion3(steps=28, guidance=7.0)
    training, evaluation = judge.settings()
    assert (training.steps, training.guidance) == (28, 7.0) and evaluation == training
    own = judge.replace(eval_steps=40, eval_guidance=4.5).settings()[1]
    assert (own.steps, own.guidance) == (40, 4.5)


@pytest.mark.parametrize("fields", [{}, {"use_t5": False, "dtype": "bfloat16"}], ids=["whole", "no T5, bfloat16"])
def test_a_judge_draws_with_its_settings_and_counts_the_weights_that_it_loads(judge, fields):
    judge = judge.replace(**fields)
    loaded, found, item = judge.load("cpu"), {name: size for name, size, _ in judge.memory()}, 2 if fields else 4
    for evaluation, steps, guidance in ((False, 1, 3.0), (True, 2, 1.0)):
        settings = RenderSettings(steps, guidance, 16, 2)
        drawn = loaded.draw(PROMPTS[:2], SEEDS[:2], evaluation=evaluation)
        assert torch.equal(drawn, loaded.render(PROMPTS[:2], SEEDS[:2], settings))
    window = 77 if fields else 256
    assert str(loaded) == f"{judge.path}: Stable Diffusion 3, 1 step, window {window} tokens, on cpu"
    pipeline = loaded.pipeline
    encoders = [pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3]
    texts = sum(held(encoder) for encoder in encoders if encoder is not None)
    assert found["transformer and VAE"] == pytest.approx(held(pipeline.transformer) + held(pipeline.vae), rel=1e-3)
    assert found["text encoders"] == pytest.approx(texts, rel=1e-3)
    assert found["drawing"] == 3 * 2 * 8 * 16 * 16 * item  # two pictures' features in the VAE's last block
    assert found["picture cache"] == 256 * 2**20
