"""A picture rendered in torch reaches the tower over dlpack, prepared as by the folder's processor."""

import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from support.vision.folders import SETTINGS
from transformers import AutoImageProcessor

from bridges import dlpack
from bridges.pixels import patches_of
from grpo_jax.models.hf.image_processor import PictureSettings, read_settings
from grpo_jax.rollout.encoding import load_image_processor
from grpo_jax.runs.policy import make_prepare

VISION = SimpleNamespace(patch=4, merge=2, frames=2, model_type="qwen2_vl", merged=4, window=None, pixels=96)


def drawn(count=3, height=24, width=40, seed=0):
    """Smooth pictures in [0, 1], as a renderer gives them; not 8-bit."""
    torch.manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 5)
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return tmp_path


@pytest.mark.parametrize("size", [None, 0])
@pytest.mark.parametrize("shape", [(24, 40), (32, 32), (80, 60), (8, 120), (5, 5)])
def test_pixel_values_are_the_processors(folder, size, shape):
    """The one on torchvision; it reads the drawn picture from 8 bits, as if it had been saved and loaded."""
    images = drawn(3, *shape)
    settings = read_settings(folder, VISION, size)
    patches, grid = patches_of(images, settings)
    eight_bit = (images * 255).round().to(torch.uint8)
    if settings.edge:
        from torchvision.transforms.v2 import functional as transforms

        mode = transforms.InterpolationMode.BICUBIC
        eight_bit = transforms.resize(eight_bit, [settings.edge] * 2, interpolation=mode, antialias=True)
    theirs = AutoImageProcessor.from_pretrained(folder)(images=list(eight_bit), return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [[1, *grid]] * 3
    flat = patches.reshape(-1, patches.shape[-1])
    torch.testing.assert_close(flat, theirs["pixel_values"], rtol=0, atol=1e-6)
    assert patches.dtype == torch.float32 and patches.is_contiguous()


def test_prepared_patches_are_handed_over_without_a_copy(folder, monkeypatch):
    image_processor = load_image_processor(folder, VISION, None)
    lent = []

    def watched(tensor, device=None):
        lent.append(tensor)
        return dlpack_to_jax(tensor, device)

    dlpack_to_jax = dlpack.to_jax
    monkeypatch.setattr(dlpack, "to_jax", watched)
    for module in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.setitem(sys.modules, module, None)  # importing it would fail: the way goes past Pillow
    prepared = make_prepare(lambda: image_processor, jax.devices()[0])(drawn(2))
    assert isinstance(prepared.patches, jax.Array) and prepared.patches.shape == (2, 1, 64, 96)
    assert prepared.patches.unsafe_buffer_pointer() == lent[0].data_ptr()
    np.testing.assert_array_equal(prepared.grid, [[[8, 8]], [[8, 8]]])
    np.testing.assert_array_equal(prepared.patches[:, 0], patches_of(drawn(2), image_processor.settings)[0].numpy())


def test_what_is_no_picture_is_refused():
    settings = PictureSettings(edge=28)
    with pytest.raises(ValueError, match="at most 200 times"):
        patches_of(torch.zeros(1, 3, 1, 500), settings)
    overshot, _ = patches_of(torch.tensor([-0.1, 1.1]).view(1, 1, 1, 2).expand(1, 3, 2, 2), settings)
    inside, _ = patches_of(torch.tensor([0.0, 1.0]).view(1, 1, 1, 2).expand(1, 3, 2, 2), settings)
    assert torch.equal(overshot, inside)
    with pytest.raises(ValueError, match=r"expected floats in \[0, 1\] or uint8, got floats from 0 to 255"):
        patches_of(torch.linspace(0, 255, 12).view(1, 3, 2, 2), settings)


@pytest.mark.skipif(not torch.cuda.is_available() or jax.default_backend() != "gpu", reason="needs a card for both")
def test_on_a_card_pictures_stay_where_they_were_drawn(folder, monkeypatch):
    """And from a card to a policy elsewhere there is one copy, of the patches."""
    image_processor = load_image_processor(folder, VISION, None)
    images = drawn(2).cuda()
    prepared = make_prepare(lambda: image_processor)(images)
    assert prepared.patches.devices() == {jax.devices("gpu")[0]}
    theirs = AutoImageProcessor.from_pretrained(folder)
    settings = image_processor.settings
    from torchvision.transforms.v2 import functional as transforms

    eight_bit = (images * 255).round().to(torch.uint8)
    mode = transforms.InterpolationMode.BICUBIC
    eight_bit = transforms.resize(eight_bit, [settings.edge] * 2, interpolation=mode, antialias=True)
    values = theirs(images=list(eight_bit), return_tensors="pt", device="cuda")["pixel_values"]
    own = np.asarray(prepared.patches).reshape(-1, 96)
    np.testing.assert_allclose(own, values.cpu().numpy(), rtol=0, atol=1e-6)
    elsewhere = make_prepare(lambda: image_processor, jax.devices("cpu")[0])(images)
    np.testing.assert_array_equal(elsewhere.patches, prepared.patches)
