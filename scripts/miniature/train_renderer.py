"""Trains the miniature's renderer: a ``StableDiffusion3Pipeline`` whose transformer and text encoders are small.

Rectified flow in pixels on endless true pictures, both text encoders learning along, on canonical complete
captions alone (one in twenty empty, for guidance). The loss leans on the pixels of the shape, which are few and
would otherwise be learned last.
"""

from __future__ import annotations

import copy
import itertools
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from bridges.miniature import world
from scripts.miniature.identity_vae import identity_vae
from scripts.miniature.vocabulary import WINDOW, clip_tokenizer

_WIDTHS = (96, 32)  # of the two text encoders
_JOINT = sum(_WIDTHS)
_EMPTY_SHARE = 0.05


class Renderer(nn.Module):
    """What is trained: the transformer and its two text encoders, wired as the pipeline wires them."""

    def __init__(self, vocab_size: int, bos: int, eos: int):
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
            num_layers=5,
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


class Captions:
    """Token ids of canonical captions, looked up word by word."""

    def __init__(self, tokenizer):
        """Tokenise the form once and remember where each attribute's word stands."""
        form = world.CANONICAL_FORM.split()
        self.slots = [form.index("{" + name + "}") + 1 for name in world.ATTRIBUTES]

        def encode(text: str) -> list[int]:
            return tokenizer(text, padding="max_length", max_length=WINDOW).input_ids

        self.form = np.array(encode(" ".join("a" if word.startswith("{") else word for word in form)))
        self.empty = np.array(encode(""))
        self.words = [np.array([encode(word)[1] for word in world.VALUES[name]]) for name in world.ATTRIBUTES]

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Ids [n, 16] of the captions of scenes [n, 6]."""
        ids = np.tile(self.form, (len(rows), 1))
        for attribute, slot in enumerate(self.slots):
            ids[:, slot] = self.words[attribute][rows[:, attribute]]
        return ids


def _batch(rng: np.random.Generator, captions: Captions, size: int):
    """Pictures in [-1, 1], token ids and pixel weights of ``size`` random scenes."""
    rows = world.sample_indices(rng, size)
    pictures = torch.from_numpy(world.draw(rows, rng)) * 2 - 1
    corner = pictures[:, :, :1, :1] + pictures[:, :, -1:, -1:]
    shape = (pictures * 2 - corner).abs().amax(1, keepdim=True) > 0.05
    near = nn.functional.max_pool2d(shape.float(), 3, 1, 1)
    weight = 1 + 3 * near
    ids = captions(rows)
    ids[rng.random(size) < _EMPTY_SHARE] = captions.empty
    return pictures, torch.from_numpy(ids), weight / weight.mean()


@torch.no_grad()
def sample(model: Renderer, ids: torch.Tensor, steps: int, seed: int) -> np.ndarray:
    """Pictures by Euler's method, as the pipeline's scheduler does with ``shift=1``."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(len(ids), 3, world.SIZE, world.SIZE, generator=noise)
    sigmas = [*np.linspace(1.0, 1 / 1000, steps), 0.0]
    for now, then in itertools.pairwise(sigmas):
        x = x + (then - now) * model(x, torch.full((len(x),), now, dtype=torch.float32), ids)
    return (x / 2 + 0.5).clamp(0, 1).numpy()


def save(model: Renderer, folder: Path) -> None:
    """Write the pipeline folder, weights in half precision."""
    tokenizer = clip_tokenizer()
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


def _report(model: Renderer, captions: Captions) -> None:
    """Print how many attributes the checker finds in renders of 96 fixed scenes."""
    rows = world.sample_indices(np.random.default_rng(5), 96)
    for steps in (4, 8):
        pictures = sample(model, torch.from_numpy(captions(rows)), steps, seed=1)
        found = world.read(pictures) == rows
        print(f"  {steps} steps: {found.mean():.3f}", np.round(found.mean(0), 2), flush=True)


def train(folder: Path, *, steps: int = 3000, seed: int = 0, batch_size: int = 64, learning_rate: float = 2e-3,
          report_every: int = 300) -> None:  # fmt: skip
    """Train from nothing and write the pipeline to ``folder`` at every report."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = clip_tokenizer()
    captions = Captions(tokenizer)
    model = Renderer(len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizers = _optimizers(model, learning_rate)
    print(f"renderer: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    start, losses = time.time(), []
    for step in range(1, steps + 1):
        rate = learning_rate * min(1.0, step / 200) * (0.01 + 0.99 * np.cos(np.pi / 2 * step / steps) ** 2)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        pictures, ids, weight = _batch(rng, captions, batch_size)
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
            print(f"renderer {step}/{steps} loss {np.mean(losses[-50:]):.4f} {time.time() - start:.0f} s", flush=True)
        if step % report_every == 0 or step == steps:
            _report(average, captions)
            save(average, folder)
