"""Train the miniature's scorer: an open_clip ``CLIP`` for canonical and casual words.

Half of each batch are variants of the other half, with a few attributes changed. Two losses share the similarities.
The contrastive loss counts every picture with all attributes of a caption as a positive. The graded loss makes the
cosine fall evenly with the share of wrong attributes, so that it is a dense reward. Attribute heads on the picture
tower help it to learn position and sharpness; they are discarded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from open_clip.model import CLIP
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTokenizer

from bridges.miniature import world
from scripts.miniature import drawing, speech
from scripts.miniature.vocabulary import WINDOW, clip_tokenizer

_MEAN, _STD = 0.5, 0.3
BEST, SLOPE = 0.6, 1.1  # the cosine of a perfect picture, and how far it falls when everything is wrong


def model_config(vocab_size: int, *, seeing: int = 24, reading: int = 128, layers: int = 3) -> dict:
    """The ``model_cfg`` of ``open_clip_config.json``, by the widths of its towers and the layers of its texts'."""
    return {
        "embed_dim": 128,
        "vision_cfg": {"image_size": world.SIZE, "layers": [1, 1, 1, 1], "width": seeing, "patch_size": None},
        "text_cfg": {
            "context_length": WINDOW,
            "vocab_size": vocab_size,
            "hf_tokenizer_name": "miniature",
            "width": reading,
            "heads": reading // 32,
            "layers": layers,
        },
    }


def _scenes(rng: np.random.Generator, size: int) -> np.ndarray:
    """Scenes [2 · size, 6]: the second half differs from the first in one to three attributes."""
    rows = speech.sample_indices(rng, size)
    variants = rows.copy()
    for i in range(size):
        changes = rng.permutation(6)[: rng.choice([1, 2, 3], p=[0.6, 0.25, 0.15])]
        variants[i] = _change(rng, rows[i], changes)
        if variants[i, 1] == variants[i, 4]:
            variants[i] = rows[i]
            variants[i, 0] = (rows[i, 0] + rng.integers(1, 6)) % 6
    return np.concatenate([rows, variants])


def caption(rng: np.random.Generator, scene: speech.Scene) -> tuple[str, np.ndarray]:
    """A caption in one of the ways people and policies write, and which attributes it asks for, bool[6]."""
    kind = rng.random()
    if kind < 0.6:
        text, requested = speech.casual_prompt(rng, scene, keep=rng.choice([0.5, 0.75, 1.0]))
        return text, np.array([name in requested for name in world.ATTRIBUTES])
    if kind < 0.75:
        return speech.canonical_caption(scene), np.ones(6, bool)
    keep = rng.random(6) < 0.8
    keep[rng.integers(6)] = True
    names = [name for name, kept in zip(world.ATTRIBUTES, keep, strict=True) if kept]
    words = {name: getattr(scene, name) for name in names}
    mixed = {k: rng.choice([v, *speech.SYNONYMS[v]]) for k, v in words.items()}
    if kind < 0.9:
        return speech.phrase(rng, mixed), keep
    # The canonical form with gaps or foreign words, as an unfinished policy writes it.
    parts = [part.format(**mixed) for name, part in _CANONICAL_PARTS.items() if name in mixed]
    return " ".join(["a", *parts]), keep


_CANONICAL_PARTS = {
    "sharpness": "{sharpness}",
    "size": "{size}",
    "colour": "{colour}",
    "shape": "{shape}",
    "position": "at the {position}",
    "background": "on {background}",
}


def wrong_share(rows: np.ndarray, captions: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Share of what each caption asks for that each picture lacks, [pictures, captions]."""
    differs = rows[:, None] != captions[None]
    return (differs & asked[None]).sum(-1) / asked.sum(-1)[None]


def augment(pictures: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Noise and tint: rendered pictures are not quite true ones."""
    n = len(pictures)
    noise = torch.from_numpy(rng.normal(size=pictures.shape).astype(np.float32))
    amount = torch.from_numpy(rng.uniform(0, 0.06, (n, 1, 1, 1)).astype(np.float32))
    tint = torch.from_numpy(rng.uniform(-0.04, 0.04, (n, 3, 1, 1)).astype(np.float32))
    return (pictures + amount * noise + tint).clamp(0, 1)


def normalise(pictures: torch.Tensor) -> torch.Tensor:
    """Normalise pictures of the right size like open_clip."""
    return (pictures - _MEAN) / _STD


def pair_losses(first: torch.Tensor, second: torch.Tensor, wrong: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Contrastive loss with several positives both ways, plus the graded one, for unit features [n, d], [m, d]."""
    cosine = first @ second.T
    positive = (wrong == 0).float()
    loss = 0.0
    for logits, target in ((scale * cosine, positive), (scale * cosine.T, positive.T)):
        seen = target.sum(1) > 0
        target = target / target.sum(1, keepdim=True).clamp(min=1)
        loss = loss + 0.5 * functional.cross_entropy(logits[seen], target[seen])
    graded = (cosine - (BEST - SLOPE * wrong)) ** 2
    near = torch.where(wrong < 0.55, 6.0, 1.0)
    return loss + 20.0 * (near * graded).sum() / near.sum()


def save(model: CLIP, config: dict, tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Write the ``local-dir:`` folder, weights in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    preprocess = {
        "size": [3, world.SIZE, world.SIZE],
        "mode": "RGB",
        "mean": [_MEAN] * 3,
        "std": [_STD] * 3,
        "interpolation": "bicubic",
        "resize_mode": "shortest",
        "fill_color": 0,
    }
    described = {"model_cfg": config, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(described, indent=2) + "\n")
    state = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_file({k: v.contiguous().clone() for k, v in state.items()}, folder / "open_clip_model.safetensors")


def score_by_wrong(image_text: Callable[[torch.Tensor, list[str]], torch.Tensor], count: int = 300) -> list[float]:
    """The mean score of true pictures that lack 0, 1, … 6 attributes of a complete casual prompt."""
    rng = np.random.default_rng(7)
    rows = speech.sample_indices(rng, count)
    texts = [speech.casual_prompt(rng, speech.scene_of(row), keep=1.0)[0] for row in rows]
    means = []
    for wrong in range(7):
        changed = np.array([_change(rng, row, rng.permutation(6)[:wrong]) for row in rows])
        valid = np.flatnonzero(changed[:, 1] != changed[:, 4])
        pictures = torch.from_numpy(drawing.draw(changed[valid], rng))
        means.append(round(float(image_text(pictures, [texts[i] for i in valid]).mean()), 4))
    return means


def _change(rng: np.random.Generator, row: np.ndarray, attributes: np.ndarray) -> np.ndarray:
    """A scene with other values for ``attributes``; shape and background may come to share their colour."""
    changed = row.copy()
    for k in attributes:
        values = len(world.VALUES[world.ATTRIBUTES[k]])
        changed[k] = (changed[k] + rng.integers(1, values)) % values
    return changed


@torch.no_grad()
def report(model: CLIP) -> None:
    """Print the scores by wrong attributes, and for each attribute how often the true picture beats a wrong one."""
    model.eval()
    tokenizer = clip_tokenizer()

    def image_text(pictures: torch.Tensor, texts: list[str]) -> torch.Tensor:
        image = model.encode_image(normalise(pictures), normalize=True)
        return (image * model.encode_text(_encode(tokenizer, texts), normalize=True)).sum(1)

    print("  score by wrong attributes", np.round(score_by_wrong(image_text), 2), flush=True)
    rng = np.random.default_rng(8)
    rows = speech.sample_indices(rng, 300)
    texts = [speech.casual_prompt(rng, speech.scene_of(row), keep=1.0)[0] for row in rows]
    true = image_text(torch.from_numpy(drawing.draw(rows, rng)), texts)
    for k, name in enumerate(world.ATTRIBUTES):
        changed = np.array([_change(rng, row, np.array([k])) for row in rows])
        higher = true > image_text(torch.from_numpy(drawing.draw(changed, rng)), texts)
        valid = changed[:, 1] != changed[:, 4]
        print(f"  {name}: {higher.numpy()[valid].mean():.3f}", end="", flush=True)
    print(" of pictures score above one with that attribute wrong", flush=True)
    model.train()


def _encode(tokenizer, texts: list[str]) -> torch.Tensor:
    batch = tokenizer(texts, padding="max_length", max_length=WINDOW, truncation=True, return_tensors="pt")
    return batch.input_ids


def train(folder: Path, *, steps: int = 2500, horizon: int = 4500, seed: int = 0, half_batch: int = 64,
          learning_rate: float = 1.5e-3, report_every: int = 500) -> None:  # fmt: skip
    """Train from nothing and write the folder at every report; the learning rate would reach 0 at ``horizon``."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = clip_tokenizer()
    config = model_config(len(tokenizer))
    model = CLIP(**config).train()
    sizes = [len(world.VALUES[name]) for name in world.ATTRIBUTES]
    heads = nn.Linear(128, sum(sizes))
    parameters = [*model.parameters(), *heads.parameters()]
    print(f"scorer: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    start, losses = time.time(), []
    for step in range(1, steps + 1):
        rate = learning_rate * min(1.0, step / 200) * (0.01 + 0.99 * np.cos(np.pi / 2 * step / horizon) ** 2)
        optimizer.param_groups[0]["lr"] = rate
        rows = _scenes(rng, half_batch)
        scenes = [speech.scene_of(row) for row in rows]
        texts, asked = zip(*(caption(rng, scene) for scene in scenes), strict=True)
        rewrites = [speech.canonical_caption(scene) for scene in scenes]
        wrong = torch.from_numpy(wrong_share(rows, rows, np.array(asked))).float()
        wrong_all = torch.from_numpy(wrong_share(rows, rows, np.ones((len(rows), 6), bool))).float()
        pictures = normalise(augment(torch.from_numpy(drawing.draw(rows, rng)), rng))
        # Attention's fused backward is several times slower on a CPU at this size.
        with sdpa_kernel(SDPBackend.MATH):
            raw = model.encode_image(pictures)
            image = functional.normalize(raw, dim=-1)
            both = model.encode_text(_encode(tokenizer, [*texts, *rewrites]), normalize=True)
            text, full = both.split(len(rows))
            scale = model.logit_scale.exp().clamp(max=50)
            loss = pair_losses(image, text, wrong, scale) + 0.5 * pair_losses(full, text, wrong, scale)
            loss = loss + 0.3 * pair_losses(image, full, wrong_all, scale)
            for logits, target in zip(heads(raw).split(sizes, dim=1), rows.T, strict=True):
                loss = loss + 0.3 * functional.cross_entropy(logits, torch.from_numpy(target))
            optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"scorer {step}/{steps} loss {np.mean(losses[-50:]):.3f} {time.time() - start:.0f} s", flush=True)
        if step % report_every == 0 or step == steps:
            report(model)
            save(model, config, tokenizer, folder)
