"""Tiny random policies with a vision tower, as the folders of their real counterparts, and their data."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from support import tiny_models

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2-VL's, but for videos."""
PATCH, MERGE = 4, 2
SETTINGS = {
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "min_pixels": 8 * 8,
    "max_pixels": 32 * 32,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}


def seeing_folder(folder, architecture: str = "qwen2_vl", *, template: str | None = TEMPLATE, **settings) -> Path:
    """A random Qwen-VL folder with a processor whose pictures have at most 16 tokens, of 8 x 8 pixels each."""
    folder = tiny_models.qwen_vl(folder, architecture)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def picture(number: int, width: int = 20, height: int = 12) -> Image.Image:
    """A picture of noise on a colour, another for each number."""
    rng = np.random.default_rng(number)
    colour = rng.integers(0, 256, 3)
    pixels = np.clip(colour + rng.integers(-40, 40, (height, width, 3)), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def write_rows(folder: Path, rows: list[dict], name: str = "rows.jsonl") -> Path:
    """A JSONL file of rows; their pictures of Pillow are written beside it and named by their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, count = [], 0
    for row in rows:
        row = dict(row)
        if isinstance(row.get("image"), Image.Image):
            row["image"].save(folder / f"{count}.png")
            row["image"], count = f"{count}.png", count + 1
        lines.append(json.dumps(row) + "\n")
    path = folder / name
    path.write_text("".join(lines))
    return path
