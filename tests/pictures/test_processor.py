"""Pictures are prepared by the folder's own processor, whose settings are honoured or refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.vision.folders import SETTINGS, picture
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from grpo_jax.errors import UserError
from grpo_jax.models.hf.image_processor import PictureSettings, make_preparer, read_settings

VISION = SimpleNamespace(patch=4, merge=2, frames=2, model_type="qwen2_vl")
REAL = {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056}


def folder_with(path, name="preprocessor_config.json", nested=False, **fields):
    path.mkdir(exist_ok=True)
    content = SETTINGS | fields
    content = {name: value for name, value in content.items() if value is not None}
    (path / name).write_text(json.dumps({"image_processor": content} if nested else content))
    return path


def vision(patch=4, model_type="qwen2_vl"):
    return SimpleNamespace(patch=patch, merge=2, frames=2, model_type=model_type)


def test_both_spellings_of_the_limits_and_both_files(tmp_path):
    old = read_settings(folder_with(tmp_path / "old"), VISION, 0)
    size = {"shortest_edge": 64, "longest_edge": 1024}
    without = {"min_pixels": None, "max_pixels": None, "size": size}
    assert read_settings(folder_with(tmp_path / "new", **without), VISION, 0) == old
    nested = folder_with(tmp_path / "nested", "processor_config.json", nested=True, **without)
    assert read_settings(nested, VISION, 0) == old
    assert (old.least, old.most, old.step, old.edge) == (64, 1024, 8, 0)
    folder_with(tmp_path / "nested", patch_size=7)  # where both stand, transformers reads the other
    assert read_settings(nested, VISION, 0) == old


@pytest.mark.parametrize(
    ("model_type", "fields", "edge"),
    [
        ("qwen2_vl", REAL, 448),
        ("qwen2_5_vl", REAL, 448),
        ("qwen3_vl", {"patch_size": 16, "min_pixels": 65536, "max_pixels": 16777216}, 512),
        ("qwen2_vl", REAL | {"max_pixels": 200 * 200}, 196),  # less is allowed
        ("qwen2_vl", REAL | {"min_pixels": 500 * 500}, 504),  # more is asked for
        ("qwen2_vl", {}, 32),
    ],
)
def test_the_size_by_default(tmp_path, model_type, fields, edge):
    folder = folder_with(tmp_path / "f", **fields)
    own = vision((SETTINGS | fields)["patch_size"], model_type)
    found = read_settings(folder, own)
    assert found.edge == edge and found.fitted(edge, edge) == found.fitted(100, 37) == (edge, edge)
    assert found.grid(9, 9) == (edge // found.patch,) * 2


@pytest.mark.parametrize(
    ("fields", "size", "reason"),
    [
        ({}, 30, r"data.picture_size: expected a multiple of 8, .*\(such as 32\), got 30"),
        ({}, 64, r"expected a side of 64 to 1024 pixels in all, .* got 64"),
        ({"patch_size": 8}, None, "patch_size: expected 4, as the tower takes it .* got 8"),
        ({"merge_size": 3}, None, "merge_size: expected 2"),
        ({"do_normalize": False}, None, "do_normalize: expected true, .* got False"),
        ({"resample": 1}, None, "resample: expected 2 or 3, got 1"),
        ({"image_std": [1, 0, 1]}, None, r"deviation\[1\]: expected a number > 0, got 0"),
        ({"image_processor_type": "CLIPImageProcessor"}, None, "image_processor_type: expected one of Qwen2VL"),
        ({"min_pixels": 5000}, None, "min_pixels: expected at most max_pixels=1024, got 5000"),
        ({"min_pixels": "a"}, None, "another type"),
    ],
)
def test_settings_that_do_not_fit_are_named(tmp_path, fields, size, reason):
    with pytest.raises(UserError, match=reason) as error:
        read_settings(folder_with(tmp_path / "f", **fields), VISION, size)
    assert "\n" not in str(error.value)


def test_a_folder_without_settings_says_what_to_copy(tmp_path):
    with pytest.raises(UserError, match=r"copy the model's preprocessor_config.json into it"):
        read_settings(tmp_path, VISION)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sizes_are_those_of_the_processor(height, width):
    own = PictureSettings(patch=14, merge=2, least=3136, most=500_000)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="at most 200 times"):
            own.fitted(height, width)
    else:
        assert own.fitted(height, width) == smart_resize(height, width, 28, 3136, 500_000)


def shapes():
    """Larger and smaller than is allowed, long, and with transparency."""
    transparent = picture(3, 21, 30).convert("RGBA")
    transparent.putalpha(100)
    return [picture(0), picture(1, 90, 70), picture(2, 3, 5), picture(4, 8, 120), picture(5).convert("L"), transparent]


def test_pictures_that_keep_their_shape_are_the_processors_own(tmp_path):
    """Bit for bit, as transformers' processor prepares them: the one of torchvision, which is installed here."""
    folder = folder_with(tmp_path / "f")
    own = read_settings(folder, VISION, 0)
    pictures = [one.convert("RGB") for one in shapes()[:-1]]
    made = make_preparer(folder, own)(pictures)
    theirs = AutoImageProcessor.from_pretrained(folder)(images=pictures, return_tensors="pt")
    assert [[1, *one.grid] for one in made] == theirs["image_grid_thw"].tolist()
    np.testing.assert_array_equal(np.concatenate([one.patches for one in made]), theirs["pixel_values"].numpy())
    assert [one.grid for one in made] == [own.grid(one.height, one.width) for one in pictures]
    assert max(h * w for h, w in (one.grid for one in made)) * 16 <= own.most


def test_pictures_of_one_size_are_the_processors_of_pictures_of_that_size(tmp_path):
    folder = folder_with(tmp_path / "f")
    own = read_settings(folder, VISION)
    made = make_preparer(folder, own)([picture(1, 90, 70), picture(2, 32, 32)])
    assert [one.grid for one in made] == [(8, 8), (8, 8)]
    import torch
    from torchvision.transforms.v2 import functional as transforms

    pixels = torch.from_numpy(np.array(picture(1, 90, 70))).permute(2, 0, 1)
    smaller = transforms.resize(pixels, [32, 32], interpolation=transforms.InterpolationMode.BICUBIC, antialias=True)
    processor = AutoImageProcessor.from_pretrained(folder)
    for given_, one in ((smaller, made[0]), (picture(2, 32, 32), made[1])):
        theirs = processor(images=[given_], return_tensors="pt")["pixel_values"].numpy()
        np.testing.assert_array_equal(one.patches, theirs)


def test_no_code_of_a_folder_runs(tmp_path):
    folder = folder_with(tmp_path / "f", auto_map={"AutoImageProcessor": "mine.Mine"})
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    prepare = make_preparer(folder, read_settings(folder, VISION))
    assert prepare([Image.new("RGB", (9, 9))])[0].grid == (8, 8) and prepare([]) == []
    assert not (tmp_path / "ran").exists()
