"""Measure the start of the miniature's policy with pictures: its greedy texts, and those through transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridges.miniature import world
from scripts.miniature import lessons, speech

Conversation = list[tuple[str, np.ndarray | None, str]]
"""(what is said, the picture f32 [3, H, W] in [0, 1] that is shown or None, what was answered) of each turn."""


def load_writer(folder: Path) -> Callable[[Sequence[Conversation]], list[str]]:
    """write(conversations, the last answers of which are "") → those answers, of the policy in ``folder``."""
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2VLForConditionalGeneration

    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    image = model.config.image_token_id
    mark = tokenizer.convert_ids_to_tokens(image)

    def write(conversations: Sequence[Conversation]) -> list[str]:
        texts, pictures = [], []
        for turns in conversations:
            messages: list[dict[str, Any]] = []
            for text, picture, answer in turns:
                shown = [] if picture is None else [{"type": "image"}]
                messages.append({"role": "user", "content": [*shown, {"type": "text", "text": text}]})
                messages.append({"role": "assistant", "content": answer})
                pictures += [] if picture is None else [torch.from_numpy(picture)]
            texts.append(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False))
        seen = {}
        if pictures:
            seen = dict(processor(images=pictures, do_rescale=False, return_tensors="pt"))
            count = int(seen["image_grid_thw"][0].prod()) // processor.merge_size**2
            texts = [text.replace(mark, mark * count) for text in texts]
        batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        kinds = (batch.input_ids == image).long()
        written = model.generate(**batch, **seen, mm_token_type_ids=kinds, max_new_tokens=12, do_sample=False)
        answers = tokenizer.batch_decode(written[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        return [answer.strip() for answer in answers]

    return write


def measure(folder: Path, prompts: int, seed: int, draw: Callable[[list[str]], torch.Tensor]) -> dict[str, Any]:
    """Pixel accuracies of the start on held-out requests, and what there is to reach.

    Args:
        folder: The policy's.
        prompts: How many of each.
        seed: Of rows and lenses.
        draw: The renderer: texts → pictures.
    """
    write = load_writer(folder)
    rows = speech.prompts("test", prompts, seed)
    lenses = [world.lens_of(seed + place) for place in range(len(rows))]

    def out(texts: list[str]) -> np.ndarray:
        return world.look(draw(texts), lenses).numpy()

    first = write([[(row["prompt"], None, "")] for row in rows])
    drawn = out(first)

    def second(pictures: Sequence[np.ndarray | None]) -> float:
        turns = zip(rows, first, pictures, strict=True)
        return accuracy(
            out(write([[(row["prompt"], None, one), (lessons.MEND, picture, "")] for row, one, picture in turns])), rows
        )

    knowing = [world.undone(row["oracle"], glass) for row, glass in zip(rows, lenses, strict=True)]
    return {
        "refinement": {
            "unmended": accuracy(out([row["oracle"] for row in rows]), rows),
            "start_turn_1": accuracy(drawn, rows),
            "start": second(list(drawn)),
            "start_wrong_picture": second([*drawn[1:], drawn[0]]),
            "start_blind": second([None] * len(rows)),
            "oracle": accuracy(out(knowing), rows),
        },
    }


def accuracy(pictures: np.ndarray, rows: Sequence[dict]) -> float:
    """Mean share of requested attributes that are there."""
    return round(float(world.pixel_accuracy(pictures, [row["requested"] for row in rows]).mean()), 4)
