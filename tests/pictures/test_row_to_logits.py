"""From a row of the data to the policy's logits: the same as with transformers' processor and model."""

import jax
import numpy as np
import pytest
import torch
import transformers
from support.vision.folders import TEMPLATE, picture, seeing_folder

from grpo_jax.config import DataSection
from grpo_jax.models import hf
from grpo_jax.models.policy import make_policy
from grpo_jax.rollout.encoding import as_chat_messages, load_image_processor, make_encode
from grpo_jax.rollout.prompts import make_prompt_set

RECORDS = [
    {"prompt": "Which is larger?", "images": [picture(0, 20, 60), picture(1, 70, 25)]},
    {"prompt": "Nothing to see here"},
    {"prompt": "What is <image> and why?", "image": picture(2, 8, 30)},
]


@pytest.mark.parametrize("size", [0, 24])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_logits_of_rows_are_transformers(family, size, tmp_path):
    folder = seeing_folder(tmp_path / "policy", family)
    loaded = hf.load_folder(folder, vision=True)
    rows = make_prompt_set(RECORDS).train
    encode = make_encode(
        loaded.tokenizer,
        DataSection(picture_size=size),
        pad_id=loaded.pad_id,
        rows=rows,
        image_processor=lambda: load_image_processor(folder, loaded.config.vision, size),
    )
    tokens, mask, pictures = encode(rows)
    policy = make_policy(loaded.config)

    @jax.jit
    def last_logits(variables):
        hidden = policy.prefill(variables, tokens, mask, policy.encode_images(variables, pictures)).hidden
        return hidden @ policy.head(variables).T

    own = np.asarray(last_logits({"params": loaded.params, "visual": loaded.visual}))

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.AutoImageProcessor.from_pretrained(folder),
        tokenizer=loaded.tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    )
    for row, mine in zip(rows, own, strict=True):
        text = processor.apply_chat_template(as_chat_messages(row), tokenize=False, add_generation_prompt=True)
        shown = [_squared(one, size) if size else one for one in row.pictures]
        batch = processor(text=[text], images=shown or None, return_tensors="pt")
        with torch.no_grad():
            theirs = model(**batch).logits[0, -1].numpy()
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
    assert np.abs(own[0] - own[2]).max() > 1e-3


def _squared(image, size):
    from torchvision.transforms.v2 import functional as transforms

    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    mode = transforms.InterpolationMode.BICUBIC
    return transforms.resize(pixels, [size, size], interpolation=mode, antialias=True)
