"""How alike pictures are by a vision model of transformers: its features, any sizes, and errors that help."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("open_clip")

from PIL import Image  # noqa: E402
from support import tiny_models  # noqa: E402

from bridges.clip import features_of  # noqa: E402
from bridges.scorers.dino import Dino  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.dinov2(tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="module")
def judge(folder):
    return Dino(str(folder)).load("cpu")


def pictures(count, size=28, seed=0):
    return torch.rand((count, 3, size, size), generator=torch.Generator().manual_seed(seed))


def test_features_are_the_class_token_of_transformers(folder, judge):
    images = pictures(6)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    mean, std = (torch.tensor(json.loads((folder / "preprocessor_config.json").read_text())[name])
                 for name in ("image_mean", "image_std"))  # fmt: skip
    with torch.no_grad():
        states = model(pixel_values=(images - mean[:, None, None]) / std[:, None, None]).last_hidden_state[:, 0]
    expected = torch.nn.functional.normalize(states, dim=-1)
    torch.testing.assert_close(judge.image_features(images), expected, atol=1e-5, rtol=0)
    found = judge.image_image(images, images.flip(0))
    torch.testing.assert_close(found, (expected * expected.flip(0)).sum(-1), atol=1e-5, rtol=0)
    assert found.std() > 1e-4


def test_resized_pictures_are_those_of_the_folders_image_processor(folder, judge):
    """But for the margin that it would cut off: all of a square picture counts."""
    images = (pictures(3, 50, seed=2) * 255).round() / 255
    seen = [Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()) for image in images]
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pixels = processor(images=seen, size={"shortest_edge": 28}, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        states = transformers.AutoModel.from_pretrained(folder).eval()(pixel_values=pixels).last_hidden_state[:, 0]
    expected = torch.nn.functional.normalize(states, dim=-1)
    torch.testing.assert_close(judge.image_features(images), expected, atol=1e-5, rtol=0)
    fast = Dino(str(folder), preprocessing="tensor").load("cpu").image_features(images)
    assert 1e-5 < (fast - expected).abs().max() < 0.05


def test_pictures_of_other_sizes_are_compared_and_each_is_encoded_once(judge):
    small, large = pictures(1)[0], pictures(1, 42, seed=1)[0]
    found = judge.image_image(torch.stack([small, small, small]), [small, large, small])
    torch.testing.assert_close(found[[0, 2]], torch.ones(2))
    assert found[1] < 1
    encoded = []

    def encode(images):
        encoded.append(tuple(images.shape))
        return images.mean((2, 3))

    features = features_of([small, large, small], encode)
    assert sorted(encoded) == [(1, 3, 28, 28), (1, 3, 42, 42)]
    torch.testing.assert_close(features, torch.stack([one.mean((1, 2)) for one in (small, large, small)]))
    with pytest.raises(ValueError, match="one picture for each of 2, got 1"):
        judge.image_image([small, small], [small])


def test_the_judges_file(folder, tmp_path):
    scorer = Dino(str(folder))
    scorer.check()
    judge = scorer.load("cpu")
    assert "Dinov2Model" in judge.summary and judge.device == torch.device("cpu")
    ((_, size, _), _) = scorer.memory()
    count = sum(parameter.numel() for parameter in transformers.AutoModel.from_pretrained(folder).parameters())
    assert size == 4 * count
    with pytest.raises(UserError, match="no such folder: /nowhere/at/all"):
        Dino("/nowhere/at/all").check()
    text = tiny_models.causal_lm(tmp_path / "text")
    with pytest.raises(UserError, match=r"expected a vision model|cannot load"):
        Dino(str(text)).load("cpu")
