"""Judges as a config has them: what they check before anything is read, what they load, what they say they take."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("open_clip")

from support import tiny_models  # noqa: E402

from bridges.diffusion import RenderSettings  # noqa: E402
from bridges.judges.open_clip import OpenClip  # noqa: E402
from bridges.judges.stable_diffusion_3 import StableDiffusion3  # noqa: E402
from grpo_jax.config.judge import title  # noqa: E402
from grpo_jax.config.run import make_config  # noqa: E402


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


OWN = """
from grpo_jax import Judge

class Vowels(Judge):
    letters: str = "aeiou"

    def __call__(self, prompts, completions, **columns):
        return [sum(text.count(letter) for letter in self.letters) for text in completions]
"""


def test_a_judge_may_be_its_own_reward_and_then_takes_no_card(tmp_path):
    file = tmp_path / "vowels.py"
    file.write_text(OWN)
    config = make_config(task="text", judges={"vowels": {"kind": f"{file}:Vowels", "letters": "a"}})
    judge = config.judges["vowels"]
    assert config.requests == {"policy": "auto", "vowels": "cpu"} and judge.memory()[0][1] == 0
    assert title(judge.load("cpu")) == "Vowels" and judge.load("cpu")(["p"], ["banana"]) == [3]
