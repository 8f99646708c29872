"""CLIP models of transformers against transformers itself: features, cosines, batches, sizes, errors."""

import json
import re
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
open_clip = pytest.importorskip("open_clip")

from safetensors.torch import load_file, save_file  # noqa: E402
from support import tiny_models  # noqa: E402
from support.imports import ROOT  # noqa: E402
from support.vision.judged import pillow, smooth  # noqa: E402
from torch.nn import functional  # noqa: E402

from bridges.judges.clip_model import ClipModel  # noqa: E402
from bridges.judges.open_clip import OpenClip  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402

TEXTS = ["a red dog", "two cats", "", "dog " * 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.clip_model(tmp_path_factory.mktemp("clip_model"))


@pytest.fixture(scope="module")
def scorer(folder):
    return ClipModel(path=str(folder), batch_size=3).load("cpu")


def of_transformers(folder, images, texts):
    """Cosine of each picture and its text as the model's card computes it."""
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    processor = transformers.CLIPProcessor.from_pretrained(folder)
    seen = [pillow(image) for image in images]
    read = {"padding": True, "truncation": True, "max_length": 77, "return_tensors": "pt"}
    with torch.no_grad():
        image = model.get_image_features(**processor(images=seen, return_tensors="pt"))
        text = model.get_text_features(**processor(text=texts, **read))
    image, text = (functional.normalize(getattr(one, "pooler_output", one), dim=-1) for one in (image, text))
    return (image * text).sum(-1)


@pytest.mark.parametrize("size", [24, 40], ids=["its own size", "resized"])
def test_similarities_are_those_of_transformers(folder, scorer, size):
    images = smooth(4, size, size)
    expected = of_transformers(folder, images, TEXTS)
    assert expected.std() > 0.03
    torch.testing.assert_close(scorer.image_text(images, TEXTS), expected, atol=1e-5, rtol=0)


def test_a_score_does_not_depend_on_what_else_is_asked(scorer):
    images = smooth(4)
    together = scorer.image_text(images, TEXTS)
    scorer._texts.clear()
    alone = [scorer.image_text(images[[row]], [TEXTS[row]]) for row in range(4)]
    assert torch.equal(torch.cat(alone), together)


def broken(folder, path, change) -> str:
    """A copy of a folder in which something is changed."""
    shutil.copytree(folder, path)
    change(path)
    return str(path)


def without_a_weight(path):
    weights = load_file(path / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def pickled(path):
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def cropped(path):
    settings = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps(settings | {"crop_size": 16}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_weight, "as a CLIPModel: its weights lack visual_projection.weight"),
        (pickled, "cannot load .*model.safetensors"),
        (cropped, "expected pictures resized and cropped to one edge"),
        (lambda path: (path / "preprocessor_config.json").unlink(), "cannot load the image processor of"),
    ],
    ids=["a weight is missing", "a pickle", "another crop", "no preprocessor"],
)
def test_broken_folders_are_one_line(folder, tmp_path, change, message):
    with pytest.raises(UserError, match=message) as caught:
        ClipModel(path=broken(folder, tmp_path / "broken", change)).load("cpu")
    assert "\n" not in str(caught.value)


def test_what_is_no_clip_is_refused_before_a_weight_is_read(tmp_path):
    other = tiny_models.causal_lm(tmp_path / "text")
    (other / "model.safetensors").unlink()
    with pytest.raises(UserError, match="expected a CLIPModel of transformers, got"):
        ClipModel(path=str(other)).check()


def test_the_page_makes_a_folder_of_weights_like_those_of_hpsv2(tmp_path, monkeypatch):
    """The block of docs/judges.md, on small towers whose weights lie in a file like the published one."""
    page = (ROOT / "docs" / "judges.md").read_text()
    (block,) = (body for body in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "HPS" in body)
    monkeypatch.chdir(tmp_path)
    large, tower = open_clip.get_model_config("ViT-H-14"), {"layers": 2, "width": 32}
    small = {part: large[part] | tower for part in ("vision_cfg", "text_cfg")} | {"embed_dim": 16}
    small["vision_cfg"]["head_width"] = small["text_cfg"]["heads"] = 16
    Path("tiny-H-14.json").write_text(json.dumps(small))
    open_clip.add_model_config(Path("tiny-H-14.json"))
    model = open_clip.create_model("tiny-H-14").eval()
    torch.save({"state_dict": model.state_dict(), "epoch": 1}, "HPS_v2.1_compressed.pt")
    exec(block.replace("ViT-H-14", "tiny-H-14"), {})
    judge = OpenClip(model=str(next(Path.cwd().glob("*/open_clip_config.json")).parent))
    judge.check()
    scorer, images = judge.load("cpu"), smooth(2, 224, 224)
    normal = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    mean, deviation = (torch.tensor(values)[:, None, None] for values in normal)
    with torch.no_grad():
        image = model.encode_image((images - mean) / deviation, normalize=True)
        text = model.encode_text(open_clip.get_tokenizer("ViT-H-14")(TEXTS[:2]), normalize=True)
    torch.testing.assert_close(scorer.image_text(images, TEXTS[:2]), (image * text).sum(-1), atol=1e-5, rtol=0)
    assert judge.memory()[0][1] == 4 * sum(weight.numel() for weight in model.parameters())
    wide = torch.cat([images, torch.zeros(2, 3, 224, 224)], dim=3)  # padded, and not cropped: all of it is seen
    assert not torch.allclose(scorer.image_features(wide), scorer.image_features(images), atol=1e-2)
