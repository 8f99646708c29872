"""A renderer that learns: its gradient against torch's own, its state, its files, and the pictures of each weights."""

import io
import json

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from support import tiny_models, tiny_pipelines  # noqa: E402

from bridges.judges import RendererTraining  # noqa: E402
from bridges.judges.stable_diffusion_3 import StableDiffusion3  # noqa: E402
from bridges.judges.text_to_image import TextToImage  # noqa: E402
from bridges.trainable import TrainableRenderer, training_memory  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402

TEXTS, SEEDS = ["a red dog", "two cats", "a red dog", "a dog of red", "two cats"], [3, 4, 2**40, 5, 4]
ADVANTAGES = np.float32([1.5, -0.7, 0.4, np.nan, -0.7])
KEY = jax.random.key(7)
SETTINGS = {"batch_size": 2, "steps": 3, "eval_steps": 3}


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """A judge of each kind of pipeline that can be trained."""
    place = tmp_path_factory.mktemp("pipelines")
    sd3 = tiny_models.stable_diffusion_3(place / "sd3", t5=False)
    sd35 = tiny_models.stable_diffusion_3(place / "sd35", dual_attention_layers=(0,), qk_norm="rms_norm")
    flux = tiny_pipelines.flux(place / "flux", guidance_embeds=True)
    return {
        "sd3": StableDiffusion3(path=str(sd3), **SETTINGS),
        "sd3.5": StableDiffusion3(path=str(sd35), **SETTINGS),
        "flux": TextToImage(path=str(flux), size=32, guidance=3.5, max_sequence_length=16, **SETTINGS),
    }


def make(judge, *, seed=0, **options):
    train = {"lora": {"rank": 4, "alpha": 8}, "learning_rate": 3e-3, "micro_batch": 3, "times": 2} | options
    return TrainableRenderer(judge.load("cpu"), RendererTraining(**train), seed=seed)


def train(renderer, iterations, first=0):
    for i in range(first, first + iterations):
        seeds = [seed + i for seed in SEEDS]
        renderer.draw(TEXTS, seeds, evaluation=False)
        metrics = renderer.learn(TEXTS, seeds, ADVANTAGES, jax.random.fold_in(KEY, i))
    return metrics


def drawn(renderer, *, evaluation=True):
    return renderer.draw(TEXTS, SEEDS, evaluation=evaluation)


def assert_equal(states, **tolerance):
    first, second = states
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], err_msg=name, **{"rtol": 0, "atol": 0} | tolerance)


def nft_in_torch(v, old, x0, x_t, t, advantage):
    reward = np.clip(advantage / 10 + 0.5, 0, 1)
    total = 0
    for share, prediction in ((reward, 0.5 * v + 0.5 * old), (1 - reward, 1.5 * old - 0.5 * v)):
        wrong = x_t - t * prediction - x0
        total = total + share * (wrong**2 / wrong.detach().abs().mean()).mean() / 0.5 * 5
    return total


@pytest.mark.parametrize("name", [pytest.param("sd3", marks=pytest.mark.wide), "sd3.5", "flux"])
def test_the_gradient_through_the_bridge_is_that_of_torch(judges, name):
    options = {"old_decay": {"maximum": 1.0, "factor": 0.3}, "max_grad_norm": 1e9, "reference_coef": 0.3}
    renderer = make(judges[name], beta=0.5, **options)
    train(renderer, 2)  # trained, old and no weights differ
    drawn(renderer, evaluation=False)
    latents = [renderer._latents[picture] for picture in zip(TEXTS, SEEDS, strict=True)]
    transformer, calls, before = renderer.pipeline.transformer, [], renderer.state()
    with transformer.register_forward_hook(lambda *call: calls.append(call[2:]), with_kwargs=True):
        renderer.learn(TEXTS, SEEDS, ADVANTAGES, KEY)
    after = renderer.state()
    renderer.restore(before)
    drawn(renderer)  # with the trained weights
    rows, total = np.repeat([0, 1, 2, 4], 2), 0  # two times of each picture with a reward, in micro-batches of 3
    for n, row in enumerate(rows):
        (inputs, (reference,)), (_, (old,)), _ = calls[n // 3 * 3 : n // 3 * 3 + 3]
        v = transformer(**inputs)[0][n % 3]
        t = inputs["timestep"][n % 3] / (1 if name == "flux" else 1000)
        advantage = float(ADVANTAGES[row])
        total += nft_in_torch(v, old[n % 3], latents[row], inputs["hidden_states"][n % 3], t, advantage)
        total += 0.3 * ((v - reference[n % 3]) ** 2).mean()
    (total / 8).backward()
    for key, parameter in renderer._parameters.items():
        gradient = (after[f"exp_avg/{key}"] - 0.9 * before[f"exp_avg/{key}"]) / 0.1
        np.testing.assert_allclose(gradient, parameter.grad, rtol=1e-3, atol=2e-6)
    assert max(float(parameter.grad.abs().max()) for parameter in renderer._parameters.values()) > 1e-4


def test_learning_is_a_function_of_state_pictures_and_key(judges):
    first, second, other = make(judges["sd3"]), make(judges["sd3"]), make(judges["sd3"], seed=1)
    metrics = train(first, 3), train(second, 2)
    assert metrics[0]["signal"] == 1 and metrics[0]["grad_norm"] > 0 and metrics[0]["skipped"] == 0
    stored = io.BytesIO()
    np.savez(stored, **second.state())
    stored.seek(0)
    train(other, 1)
    other.restore(dict(np.load(stored)))
    for renderer in (second, other):
        assert train(renderer, 1, first=2) == metrics[0]
        assert_equal((first.state(), renderer.state()))
        for evaluation in (False, True):
            assert torch.equal(drawn(first, evaluation=evaluation), drawn(renderer, evaluation=evaluation))
    first.learn(TEXTS, SEEDS, ADVANTAGES, KEY)
    second.learn(TEXTS, SEEDS, ADVANTAGES, jax.random.key(8))
    with pytest.raises(AssertionError):
        assert_equal((first.state(), second.state()))


def test_micro_batches_change_nothing_but_rounding(judges):
    renderers = [make(judges["sd3"], micro_batch=size, updates=2) for size in (3, 16)]
    metrics = [train(renderer, 1) for renderer in renderers]
    for renderer, got in zip(renderers[1:], metrics[1:], strict=True):
        assert_equal((renderers[0].state(), renderer.state()), rtol=1e-3, atol=2e-5)
        assert got == pytest.approx(metrics[0], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["sd3.5", "flux"])
def test_the_exported_file_draws_the_same_in_a_plain_pipeline(judges, name, tmp_path):
    renderer = make(judges[name])
    train(renderer, 2)
    renderer.save_lora(tmp_path)
    plain = judges[name].load("cpu")
    before = drawn(plain)
    plain._cache.images.clear()
    plain.pipeline.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    torch.testing.assert_close(drawn(plain), drawn(renderer), atol=1e-5, rtol=0)
    assert (before - drawn(renderer)).abs().max() > 1e-3


def test_each_picture_is_of_its_weights_and_the_base_stays(judges):
    plain, renderer = judges["sd3"].load("cpu"), make(judges["sd3"], old_decay={"factor": 1.0, "maximum": 1.0})
    base = {name: value.clone() for name, value in plain.pipeline.transformer.state_dict().items()}
    demanding = [parameter.requires_grad for parameter in plain.pipeline.vae.parameters()]
    untrained = drawn(plain)
    assert torch.equal(drawn(renderer), untrained) and torch.equal(drawn(renderer, evaluation=False), untrained)
    with renderer.untrained():
        kept = drawn(renderer)
    assert torch.equal(kept, untrained)
    renderer.learn(TEXTS, SEEDS, ADVANTAGES, KEY)
    assert renderer.evaluation.steps == renderer.training.steps  # yet other weights, and other pictures
    assert (drawn(renderer) - untrained).abs().max() > 1e-3
    assert torch.equal(drawn(renderer, evaluation=False), untrained)  # with this decay the old weights never move
    cached = len(renderer._cache.images)
    with renderer.untrained():
        assert torch.equal(drawn(renderer), untrained)
    assert len(renderer._cache.images) == cached  # they were kept
    after = {
        name.replace(".base_layer", ""): value for name, value in renderer.pipeline.transformer.state_dict().items()
    }
    assert all(torch.equal(after[name], value) for name, value in base.items())
    drawn(renderer)
    trainable = [name for name, one in renderer.pipeline.transformer.named_parameters() if one.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)
    assert demanding == [parameter.requires_grad for parameter in renderer.pipeline.vae.parameters()]


def test_the_old_weights_follow_the_trained_ones(judges):
    renderer = make(judges["sd3"], old_decay={"factor": 0.25, "maximum": 0.4})
    for share in (0.25, 0.4):
        before = renderer.state()
        train(renderer, 1)
        after = renderer.state()
        for name in renderer._parameters:
            expected = share * before[f"old/{name}"] + (1 - share) * after[f"trained/{name}"]
            np.testing.assert_allclose(after[f"old/{name}"], expected, atol=1e-7)


def test_without_signal_nothing_changes_and_broken_updates_are_skipped_until_a_finite_one(judges):
    renderer = make(judges["sd3"])
    drawn(renderer, evaluation=False)
    before = renderer.state()
    metrics = renderer.learn(TEXTS, SEEDS, np.float32([0, np.nan, 0, 0, 0]), KEY)
    assert metrics == {"signal": 0}
    with pytest.raises(KeyError, match="a red dog"):  # those pictures are forgotten
        renderer.learn(TEXTS, SEEDS, ADVANTAGES, KEY)
    for count in (1, 2):
        drawn(renderer, evaluation=False)
        renderer._latents[TEXTS[0], SEEDS[0]].fill_(float("inf"))
        assert renderer.learn(TEXTS, SEEDS, ADVANTAGES, KEY)["skipped"] == 1
        assert_equal((before | {"skipped": np.array(count)}, renderer.state()))
    resumed = make(judges["sd3"])
    resumed.restore(renderer.state())
    assert train(resumed, 1)["skipped"] == 0 and (resumed.skipped, resumed.updates) == (0, 1)


def test_bfloat16_is_close_to_float32(judges):
    renderers = [make(judges["sd3"], lora={"rank": 2, "alpha": 4}, autocast=autocast) for autocast in (False, True)]
    norms = [train(renderer, 1)["grad_norm"] for renderer in renderers]
    assert norms[0] == pytest.approx(norms[1], rel=0.1) and norms[0] != norms[1]
    half = make(judges["sd3"].replace(dtype="bfloat16"))
    assert train(half, 1)["grad_norm"] > 0
    assert {value.dtype for name, value in half.state().items() if "/" in name} == {np.dtype("float32")}


def test_pipelines_that_cannot_be_trained_are_refused_before_weights_are_read(judges, tmp_path):
    unet = tiny_pipelines.stable_diffusion(tmp_path / "unet")
    sana = tiny_pipelines.sana(tmp_path / "sana")
    schnell = tiny_pipelines.flux(tmp_path / "one")
    turbo = tiny_models.stable_diffusion_3(tmp_path / "sd3.5-large-turbo", t5=False)
    quantised = tiny_models.stable_diffusion_3(tmp_path / "nf4", t5=False)
    config = json.loads((quantised / "transformer" / "config.json").read_text())
    (quantised / "transformer" / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    training = RendererTraining()
    cases = {
        "velocity .*got 'StableDiffusionPipeline": TextToImage(path=str(unet)),
        "velocity .*got 'SanaPipeline": TextToImage(path=str(sana)),
        "not distilled": TextToImage(path=str(schnell), size=32),
        "distilled .*turbo": StableDiffusion3(path=str(turbo)),
        "not quantised": StableDiffusion3(path=str(quantised)),
        "guidance: expected 1 with train": judges["sd3"].replace(guidance=2.0),
        "dtype: expected float32 or bfloat16 with train": judges["sd3"].replace(dtype="float16"),
    }
    for message, judge in cases.items():
        with pytest.raises(UserError, match=message) as error:
            judge.replace(train=training).check()
        assert "\n" not in str(error.value)
    judges["flux"].replace(train=training).check()
    with pytest.raises(UserError, match="not distilled"):
        TrainableRenderer(cases["not distilled"].load("cpu"), training, seed=0)
    with pytest.raises(UserError, match=r"targets: expected layers of a SD3Transformer2DModel, got \['to_qq'\]"):
        make(judges["sd3"], lora={"targets": ["to_q", "to_qq"]})
    with pytest.raises(UserError, match="merged, got"):
        TrainableRenderer(make(judges["sd3"]), training, seed=0)


@pytest.mark.parametrize("name", ["sd3.5", pytest.param("flux", marks=pytest.mark.wide)])
def test_the_planned_activations_are_those_that_torch_keeps(judges, name):
    renderer = make(judges[name], micro_batch=4, times=1)
    drawn(renderer, evaluation=False)
    kept, frozen = {}, {one.untyped_storage().data_ptr() for one in renderer.pipeline.transformer.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        renderer.learn(TEXTS, SEEDS, ADVANTAGES, KEY)
    measured = sum(one.untyped_storage().nbytes() for place, one in kept.items() if place not in frozen)
    lora, activations = (size for _, size, _ in training_memory(judges[name], renderer.train, fused=False))
    assert activations == pytest.approx(measured, rel=0.05)
    values = [value for name, value in renderer.state().items() if "/" in name]
    assert lora == sum(value.nbytes for value in values) * 5 // 4
    assert training_memory(judges[name], renderer.train)[1][1] < activations
