"""Train the scorer of the miniature's harder world (`scenes`): an open_clip ``CLIP`` for both grammars.

Each casual request is completed to a scene, and one change makes a near miss. Losses are those of `train_scorer`:
contrastive, and graded by the share of a text's attributes that a picture lacks, once more for near misses only.
Heads on both towers name objects and positions, and are discarded. The text tower learns to read before it sees a
picture, from position embeddings as large as those of words. Otherwise it learns a bag of words, in which "red
circle, blue square" and "blue circle, red square" are equal. The checker is not used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from open_clip.model import CLIP
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bridges.miniature import scenes
from scripts.miniature import speech_scenes, train_scorer, vocabulary
from scripts.miniature.drawing import draw_scenes, request_of
from scripts.miniature.train_renderer import encode
from scripts.miniature.train_scorer import BEST, SLOPE, augment, normalise, pair_losses

_NUMBERS = len(scenes.NUMBERS)
_SIZES = (len(scenes.LAYOUTS), *2 * (len(scenes.SHAPES), len(scenes.COLOURS)))
_UNSAID, _IGNORED = -1, -100
_POSITIONS, _READING_RATE = 0.1, 3e-3


def fill_in(rng: np.random.Generator, requested: dict[str, Any]) -> np.ndarray:
    """A scene that shows what is requested, i64[5], all that is left unsaid by chance."""
    objects, place = requested["objects"], requested["place"]
    things = [
        (scenes.SHAPES.index(s), scenes.COLOURS.index(c) if c else int(rng.integers(len(scenes.COLOURS))))
        for s, c in objects
    ]
    if len({shape for shape, _ in objects}) == 1:
        return np.array([len(objects) - 1, *things[0], *things[0]])
    layout = scenes.LAYOUTS.index(place) if place else rng.integers(_NUMBERS, len(scenes.LAYOUTS))
    return np.array([layout, *things[0], *things[1]])


def vary(rng: np.random.Generator, row: np.ndarray) -> np.ndarray:
    """A near miss of a scene: another layout, shape or colour, or shapes or colours exchanged."""
    row = row.copy()
    if row[0] < _NUMBERS and rng.random() < 0.3:  # one of them becomes another
        row[0] = rng.integers(_NUMBERS, len(scenes.LAYOUTS))
        row[3] = (row[3] + rng.integers(1, len(scenes.SHAPES))) % len(scenes.SHAPES)
    elif row[0] < _NUMBERS:
        place = rng.choice([0, 1, 2])
        of = (_NUMBERS, len(scenes.SHAPES), len(scenes.COLOURS))[place]
        row[place] = (row[place] + rng.integers(1, of)) % of
        row[3:] = row[1:3]
    elif (way := rng.integers(10)) < 4:
        of = 1 + way % 2
        row[of], row[2 + of] = row[2 + of], row[of]
    elif way < 6:
        row[0] = _NUMBERS + (row[0] - _NUMBERS + rng.integers(1, 4)) % 4
    elif way < 7:
        row[:] = [rng.integers(_NUMBERS), row[1], row[2], row[1], row[2]]
    else:
        place = rng.choice([1, 2, 3, 4])
        of = _SIZES[place]
        row[place] = (row[place] + rng.integers(1, of)) % of
    return row


def wanted_of(requested: dict[str, Any]) -> np.ndarray:
    """A request as number, place, shape, colour, shape, colour: i64[6], -1 where unsaid."""
    objects, place = requested["objects"], requested["place"]
    things = [
        index
        for shape, colour in (objects[0], objects[-1])
        for index in (scenes.SHAPES.index(shape), scenes.COLOURS.index(colour) if colour else _UNSAID)
    ]
    return np.array([len(objects), scenes.LAYOUTS.index(place) if place else _UNSAID, *things])


def wrong_share(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Share of what each request [m, 6] says that each scene [n, 5] lacks, [n, m]: number, shapes, objects, place."""
    layout, shapes, colours = rows[:, None, 0], rows[:, None, 1::2], rows[:, None, 2::2]
    number, place, asked, dyed = wanted[None, :, 0], wanted[None, :, 1], wanted[None, :, 2::2], wanted[None, :, 3::2]
    same = shapes[..., :, None] == asked[..., None, :]  # [n, m, there, asked for]
    fits = same & ((dyed[..., None, :] == _UNSAID) | (colours[..., :, None] == dyed[..., None, :]))
    count = np.where(layout < _NUMBERS, layout + 1, 2)
    opposite = np.array([*range(_NUMBERS), 5, 4, 7, 6])[layout]
    there = (fits[..., 0, 0] & fits[..., 1, 1] & (layout == place)) | (
        fits[..., 1, 0] & fits[..., 0, 1] & (opposite == place)
    )
    facts = [(count != number, 2.0), (~there, 2.0 * (place != _UNSAID))]
    for k in range(2):
        facts.append((~same[..., k].any(-1), 1.0))
        facts.append((~fits[..., k].any(-1), 1.0 * (dyed[..., k] != _UNSAID)))
    # Where one of several is another shape or colour, not all are what was asked for.
    one = (asked[..., 0] == asked[..., 1]) & (dyed[..., 0] == dyed[..., 1])
    facts.append((~fits[..., 0].all(-1), 1.0 * one))
    weight = sum(np.broadcast_to(w, number.shape) for _, w in facts)
    return sum(wrong * w for wrong, w in facts) / weight


class Names(nn.Linear):
    """Heads that both towers share: layout, shapes and colours in the order of the picture, and each coloured shape."""

    def __init__(self, width: int):
        super().__init__(width, sum(_SIZES) + len(scenes.SHAPES) * len(scenes.COLOURS))

    def loss(self, features: torch.Tensor, rows: np.ndarray, placed: np.ndarray, dyed: np.ndarray) -> torch.Tensor:
        """Cross-entropies of features [n, d] of scenes, where the order of things is said, and where colours are."""
        *logits, things = self(features).split([*_SIZES, self.out_features - sum(_SIZES)], dim=1)
        # "Right" and "below" are said as "left" and "above": the picture is the same.
        turned = np.concatenate([rows[:, :1] - 1, rows[:, 3:], rows[:, 1:3]], axis=1)
        target = np.where(np.isin(rows[:, :1], (5, 7)), turned, rows)
        target[~placed] = _IGNORED
        target[np.ix_(~dyed, [2, 4])] = _IGNORED
        loss = sum(
            functional.cross_entropy(one, torch.from_numpy(right.copy()), ignore_index=_IGNORED)
            for one, right in zip(logits, target.T, strict=True)
        )
        both = torch.from_numpy(rows[:, 1::2] * len(scenes.COLOURS) + rows[:, 2::2])
        there = torch.zeros_like(things).scatter_(1, both, 1.0)
        misses = functional.binary_cross_entropy_with_logits(things, there, reduction="none").sum(1)
        return loss + misses[torch.from_numpy(dyed)].mean()


def _batch(rng: np.random.Generator, half: int) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Scenes [2 · half, 5], texts and what they ask for: requests with a scene each, and near misses of these."""
    texts, requests = zip(
        *(speech_scenes.casual_prompt(rng, str(rng.choice(scenes.KINDS)))[:2] for _ in range(half)), strict=True
    )
    rows = [fill_in(rng, requested) for requested in requests]
    near = [vary(rng, row) for row in rows]
    wanted = [wanted_of(requested) for requested in requests]
    return np.stack([*rows, *near]), list(texts), np.stack(wanted)


def _said(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of requests [n, 6], whether they say the order of things, and their colours."""
    one = (wanted[:, 2] == wanted[:, 4]) & (wanted[:, 3] == wanted[:, 5])
    return (wanted[:, 1] != _UNSAID) | one, wanted[:, 3] != _UNSAID


@torch.no_grad()
def report(model: CLIP, tokenizer) -> None:
    """Print how often a true picture scores above its near miss that lacks something, by kind."""
    model.eval()
    rng = np.random.default_rng(8)
    for kind in scenes.KINDS:
        asked = [speech_scenes.casual_prompt(rng, kind) for _ in range(200)]
        rows = np.stack([fill_in(rng, requested) for _, requested, _ in asked])
        near = np.stack([vary(rng, row) for row in rows])
        wanted = np.stack([wanted_of(requested) for _, requested, _ in asked])
        worse = np.diagonal(wrong_share(near, wanted)) > 0
        text = model.encode_text(encode(tokenizer, [text for text, *_ in asked]), normalize=True)
        scores = [
            (model.encode_image(normalise(torch.from_numpy(draw_scenes(r, rng))), normalize=True) * text).sum(1)
            for r in (rows, near)
        ]
        higher = (scores[0] > scores[1]).numpy()[worse].mean()
        print(f"  {kind}: {higher:.3f} ({scores[0].mean():.2f}, {scores[1].numpy()[worse].mean():.2f})", flush=True)
    model.train()


def _learn_to_read(model: CLIP, names: Names, tokenizer, rng: np.random.Generator, steps: int) -> None:
    """Train the texts' tower alone to name what captions and requests say."""
    nn.init.normal_(model.positional_embedding, std=_POSITIONS)
    parameters = [one for name, one in model.named_parameters() if not name.startswith("visual")]
    parameters = [*parameters, *names.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_READING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _READING_RATE, total_steps=steps + 1, pct_start=0.1)
    for step in range(1, steps + 1):
        rows, texts, wanted = _batch(rng, 64)
        captions = [speech_scenes.canonical_caption(request_of(row)) for row in rows]
        with sdpa_kernel(SDPBackend.MATH):
            loss = _reading_loss(names, model.encode_text(encode(tokenizer, [*texts, *captions])), rows, wanted)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"scorer reading {step}/{steps} loss {loss.item():.3f}", flush=True)


def _reading_loss(names: Names, read: torch.Tensor, rows: np.ndarray, wanted: np.ndarray) -> torch.Tensor:
    """What the states of requests and of all scenes' captions, [3 · n, d], do not name."""
    half, every = len(wanted), np.ones(len(rows), bool)
    return names.loss(read[half:], rows, every, every) + names.loss(read[:half], rows[:half], *_said(wanted))


def train(folder: Path, *, steps: int = 800, seed: int = 0, half_batch: int = 64, learning_rate: float = 1.5e-3,
          report_every: int = 200, eye: Mapping[str, Any] = MappingProxyType({})) -> None:  # fmt: skip
    """Train from nothing and write the folder at every report; ``eye`` changes open_clip's ``vision_cfg``."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = vocabulary.clip_tokenizer(vocabulary.scene_words())
    config = train_scorer.model_config(len(tokenizer), seeing=10, reading=64, layers=3)
    config["vision_cfg"] |= eye
    model = CLIP(**config).train()
    names = Names(128)
    _learn_to_read(model, names, tokenizer, rng, steps)
    parameters = [*model.parameters(), *names.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    start, losses = time.process_time(), []
    for step in range(1, steps + 1):
        rate = learning_rate * min(1.0, step / 200) * (0.01 + 0.99 * np.cos(np.pi / 2 * step / steps) ** 2)
        optimizer.param_groups[0]["lr"] = rate
        rows, texts, wanted = _batch(rng, half_batch)
        shown = [request_of(row) for row in rows]
        captions = [speech_scenes.canonical_caption(requested) for requested in shown]
        wrong = torch.from_numpy(wrong_share(rows, wanted)).float()
        wrong_all = torch.from_numpy(wrong_share(rows, np.stack([wanted_of(one) for one in shown]))).float()
        pictures = normalise(augment(torch.from_numpy(draw_scenes(rows, rng)), rng))
        # Attention's fused backward is several times slower on a CPU at this size.
        with sdpa_kernel(SDPBackend.MATH):
            raw = model.encode_image(pictures)
            read = model.encode_text(encode(tokenizer, [*texts, *captions]))
            image, features = functional.normalize(raw, dim=-1), functional.normalize(read, dim=-1)
            scale = model.logit_scale.exp().clamp(max=50)
            text, full = features.split([half_batch, 2 * half_batch])
            loss = pair_losses(image, text, wrong, scale) + 0.3 * pair_losses(image, full, wrong_all, scale)
            for seen, said, lacks in (
                (image[:half_batch], text, wrong[:half_batch]),
                (image[half_batch:], text, wrong[half_batch:]),
                (image.roll(half_batch, 0), full, wrong_all.roll(half_batch, 0)),
            ):
                misses = (seen * said).sum(1) - (BEST - SLOPE * lacks.diagonal())
                loss = loss + 10.0 * (misses**2).mean()
            every = np.ones(2 * half_batch, bool)
            loss = loss + 0.3 * names.loss(raw, rows, every, every)
            loss = loss + 0.3 * _reading_loss(names, read, rows, wanted)
            optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            seconds = time.process_time() - start
            print(f"scorer {step}/{steps} loss {np.mean(losses[-50:]):.3f} {seconds:.0f} s", flush=True)
        if step % report_every == 0 or step == steps:
            report(model, tokenizer)
            train_scorer.save(model, config, tokenizer, folder)
