"""Train the miniature's renderer: a ``StableDiffusion3Pipeline`` with small transformer and text encoders.

Rectified flow in pixels trains on endless true pictures, with both text encoders, on complete canonical captions
only (one in twenty is empty, for guidance). The loss weighs the few pixels of the shape more, which would otherwise
be learned last.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from bridges.miniature import world
from scripts.miniature import drawing, speech, vocabulary
from scripts.miniature.identity_vae import identity_vae
from scripts.miniature.vocabulary import WINDOW

_WIDTHS = (96, 32)  # of the two text encoders
_JOINT = sum(_WIDTHS)
_EMPTY_SHARE = 0.05


class Renderer(nn.Module):
    """What is trained: the transformer and its two text encoders, wired as the pipeline wires them."""

    def __init__(self, vocab_size: int, bos: int, eos: int, blocks: int = 5):
        """Build the parts with zero-initialised modulation and output."""
        super().__init__()
        encoders = []
        for width, layers in zip(_WIDTHS, (2, 1), strict=True):
            config = CLIPTextConfig(
                vocab_size=vocab_size,
                hidden_size=width,
                intermediate_size=4 * width,
                projection_dim=width,
                num_hidden_layers=layers,
                num_attention_heads=width // 32 if width > 32 else 2,
                max_position_embeddings=WINDOW,
                bos_token_id=bos,
                eos_token_id=eos,
                pad_token_id=eos,
            )
            encoders.append(CLIPTextModelWithProjection(config))
        self.encoders = nn.ModuleList(encoders)
        self.transformer = SD3Transformer2DModel(
            sample_size=world.SIZE,
            patch_size=4,
            in_channels=3,
            out_channels=3,
            num_layers=blocks,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=_JOINT,
            caption_projection_dim=128,
            pooled_projection_dim=_JOINT,
            pos_embed_max_size=world.SIZE // 4,
        )
        for name, module in self.transformer.named_modules():
            if isinstance(module, nn.Linear) and ("norm1" in name or name in ("norm_out.linear", "proj_out")):
                nn.init.zeros_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, noisy: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The velocity of ``noisy`` [B, 3, 32, 32] at ``sigma`` [B] for captions ``ids`` [B, 16]."""
        outputs = [encoder(ids, output_hidden_states=True) for encoder in self.encoders]
        words = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        # The pipeline puts a row of zeros where T5's states would be.
        words = torch.cat([words, words.new_zeros(len(words), 1, _JOINT)], dim=1)
        pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
        return self.transformer(noisy, words, pooled, sigma * 1000, return_dict=False)[0]


class Subject(NamedTuple):
    """What a renderer learns to draw: a world's words, its scenes as rows of indices, and how they are checked.

    Attributes:
        words: Each is one token.
        caption: A row's canonical caption.
        sample: (rng, n) → rows.
        draw: (rows, rng) → pictures f32 [n, 3, 32, 32] in [0, 1].
        found: (pictures, rows) → what the checker finds of each row, [n, k].
    """

    words: Collection[str]
    caption: Callable[[np.ndarray], str]
    sample: Callable[[np.random.Generator, int], np.ndarray]
    draw: Callable[[np.ndarray, np.random.Generator], np.ndarray]
    found: Callable[[np.ndarray, np.ndarray], np.ndarray]


SINGLE = Subject(
    vocabulary.world_words(),
    lambda row: speech.canonical_caption(speech.scene_of(row)),
    speech.sample_indices,
    drawing.draw,
    lambda pictures, rows: world.read(pictures) == rows,
)
"""The first world."""


def encode(tokenizer: CLIPTokenizer, captions: Iterable[str]) -> torch.Tensor:
    """Ids [n, 16] of captions."""
    return tokenizer([*captions], padding="max_length", max_length=WINDOW, return_tensors="pt").input_ids


def _batch(rng: np.random.Generator, subject: Subject, tokenizer: CLIPTokenizer, size: int):
    """Pictures in [-1, 1], token ids and pixel weights of ``size`` random scenes."""
    rows = subject.sample(rng, size)
    pictures = torch.from_numpy(subject.draw(rows, rng)) * 2 - 1
    corner = pictures[:, :, :1, :1] + pictures[:, :, -1:, -1:]
    shape = (pictures * 2 - corner).abs().amax(1, keepdim=True) > 0.05
    near = nn.functional.max_pool2d(shape.float(), 3, 1, 1)
    weight = 1 + 3 * near
    empty = rng.random(size) < _EMPTY_SHARE
    captions = ["" if left_out else subject.caption(row) for left_out, row in zip(empty, rows, strict=True)]
    return pictures, encode(tokenizer, captions), weight / weight.mean()


@torch.no_grad()
def sample(model: Renderer, ids: torch.Tensor, steps: int, seed: int) -> np.ndarray:
    """Pictures by Euler's method, as the pipeline's scheduler does with ``shift=1``."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(len(ids), 3, world.SIZE, world.SIZE, generator=noise)
    sigmas = [*np.linspace(1.0, 1 / 1000, steps), 0.0]
    for now, then in itertools.pairwise(sigmas):
        x = x + (then - now) * model(x, torch.full((len(x),), now, dtype=torch.float32), ids)
    return (x / 2 + 0.5).clamp(0, 1).numpy()


def save(model: Renderer, tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Write the pipeline folder, weights in half precision."""
    pipeline = StableDiffusion3Pipeline(
        transformer=copy.deepcopy(model.transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=identity_vae(world.SIZE),
        text_encoder=copy.deepcopy(model.encoders[0]),
        tokenizer=tokenizer,
        text_encoder_2=copy.deepcopy(model.encoders[1]),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.to(dtype=torch.float16)
    pipeline.save_pretrained(folder, safe_serialization=True)


def _optimizers(model: Renderer, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for everything else."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        inside = "transformer_blocks." in name and parameter.ndim == 2
        (matrices if inside else rest).append(parameter)
    muon = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)]


def _report(model: Renderer, subject: Subject, tokenizer: CLIPTokenizer) -> None:
    """Print how much the checker finds in renders of 96 fixed scenes."""
    rows = subject.sample(np.random.default_rng(5), 96)
    ids = encode(tokenizer, map(subject.caption, rows))
    for steps in (1, 4, 8):
        found = subject.found(sample(model, ids, steps, seed=1), rows)
        print(f"  {steps} steps: {np.nanmean(found):.3f}", np.round(np.nanmean(found, 0), 2), flush=True)


def train(folder: Path, *, steps: int = 3000, seed: int = 0, batch_size: int = 64, learning_rate: float = 2e-3,
          report_every: int = 300, subject: Subject = SINGLE, blocks: int = 5,
          start_from: Path | None = None) -> None:  # fmt: skip
    """Train and write the pipeline to ``folder`` at every report; from nothing, or on from ``start_from``'s weights.

    What was trained until a report is kept in FOLDER.pt beside the folder until the end; training goes on from there.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = vocabulary.clip_tokenizer(subject.words)
    model = Renderer(len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, blocks)
    if start_from is not None:
        _copy_weights(model, tokenizer, start_from)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizers = _optimizers(model, learning_rate)
    print(f"renderer: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    start, losses = time.process_time(), []
    parts, state, done = [model, average, *optimizers], folder.with_name(f"{folder.name}.pt"), 0
    if state.exists():
        done, rng, torch_state, states = torch.load(state, weights_only=False)
        torch.set_rng_state(torch_state)
        for part, values in zip(parts, states, strict=True):
            part.load_state_dict(values)
    for step in range(done + 1, steps + 1):
        rate = learning_rate * min(1.0, step / 200) * (0.01 + 0.99 * np.cos(np.pi / 2 * step / steps) ** 2)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        pictures, ids, weight = _batch(rng, subject, tokenizer, batch_size)
        sigma = torch.rand(batch_size)
        noise = torch.randn_like(pictures)
        s = sigma[:, None, None, None]
        # Attention's fused backward is several times slower on a CPU at this size.
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", dtype=torch.bfloat16):
            velocity = model((1 - s) * pictures + s * noise, sigma, ids)
            loss = (weight * (velocity - (noise - pictures)) ** 2).mean()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        decay = min(0.998, step / (step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        losses.append(loss.item())
        if step % 50 == 0:
            seconds = time.process_time() - start
            print(f"renderer {step}/{steps} loss {np.mean(losses[-50:]):.4f} {seconds:.0f} s", flush=True)
        if step % report_every == 0 or step == steps:
            _report(average, subject, tokenizer)
            save(average, tokenizer, folder)
            torch.save((step, rng, torch.get_rng_state(), [part.state_dict() for part in parts]), state)
    state.unlink(missing_ok=True)


def _copy_weights(model: Renderer, tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Start from another renderer's weights; words that it did not know keep their own."""
    other = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    blocks, others = len(model.transformer.transformer_blocks), len(other.transformer.transformer_blocks)
    values = other.transformer.state_dict()
    for block in range(blocks):  # of theirs, the first, the last and some between
        theirs = block * (others - 1) // (blocks - 1)
        for name in model.transformer.transformer_blocks[block].state_dict():
            values[f"transformer_blocks.{block}.{name}"] = values[f"transformer_blocks.{theirs}.{name}"]
    model.transformer.load_state_dict({name: values[name] for name in model.transformer.state_dict()})
    known = other.tokenizer.get_vocab()
    pairs = [(i, known[word]) for word, i in tokenizer.get_vocab().items() if word in known]
    here, there = map(list, zip(*pairs, strict=True))
    for ours, theirs in zip(model.encoders, (other.text_encoder, other.text_encoder_2), strict=True):
        embedding = ours.get_input_embeddings().weight.detach().clone()
        embedding[here] = theirs.get_input_embeddings().weight[there].float()
        values = dict(theirs.state_dict())
        (name,) = [name for name in values if name.endswith("token_embedding.weight")]
        ours.load_state_dict({**values, name: embedding})
