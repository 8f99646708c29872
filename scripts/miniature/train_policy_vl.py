"""Make the miniature's initial policy with pictures by SFT, in three parts.

First the tower alone learns to see, from pictures of all scenes: linear heads, discarded afterwards, read the
attributes from its states. Then, with a frozen tower, the language model learns from correct conversations
(`lessons`) to name, to translate and to correct. Last it sees weak ones: it keeps the form, and its texts become
mostly wrong.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

from bridges.miniature import world
from scripts.miniature import lessons, vocabulary
from scripts.miniature.lessons import Turn
from scripts.miniature.train_policy import END, PAD, REWRITE, USER

VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|rewrite|>{% else %}<|user|>{% endif %}"
    "{% if message['content'] is string %} {{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|rewrite|>{% endif %}"
)
PATCH, MERGE, FRAMES = 4, 2, 2
SIDE = world.SIZE // PATCH // MERGE
"""Merged tokens along each side of a picture."""

_LENGTH, _PICTURES, _CONVERSATIONS = 80, 48, 32
_IGNORED = -100


class Batch(NamedTuple):
    """Lessons as arrays.

    Attributes:
        tokens: i64 [B, L], right-padded.
        targets: i64 [B, L], the next token where the policy wrote it, else -100.
        positions: i64 [3, B, L], time, row and column.
        patches: f32 [n, S, C], of the pictures in their order.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    patches: torch.Tensor


def seeing_tokenizer() -> Qwen2Tokenizer:
    """The miniature policy's tokenizer with the words of `lessons` and the marks of pictures."""
    words = {*vocabulary.world_words(), *lessons.RECREATE.split(), *lessons.MEND.split()}
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=5000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(sorted(words), trainer)
    model = json.loads(backend.to_str())["model"]
    marks = (PAD, END, USER, REWRITE, VISION_START, VISION_END, IMAGE, VIDEO)
    return Qwen2Tokenizer(
        vocab=model["vocab"] | {token: len(model["vocab"]) + i for i, token in enumerate(marks)},
        merges=[tuple(pair) for pair in model["merges"]],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, REWRITE, VISION_START, VISION_END, IMAGE, VIDEO],
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def image_processor() -> Qwen2VLImageProcessor:
    """What prepares pictures for the policy: every one becomes as large as the world's."""
    return Qwen2VLImageProcessor(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=FRAMES,
        size={"shortest_edge": world.SIZE**2, "longest_edge": world.SIZE**2},
        image_mean=[0.5] * 3,
        image_std=[0.25] * 3,
    )


def untrained(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2VLForConditionalGeneration:
    """A model with random weights."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in (
        ("vision_start", VISION_START), ("vision_end", VISION_END), ("image", IMAGE), ("video", VIDEO)
    )}  # fmt: skip
    config = Qwen2VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        vision_config=dict(
            depth=3,
            embed_dim=96,
            num_heads=4,
            hidden_size=128,
            mlp_ratio=2,
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            temporal_patch_size=FRAMES,
        ),
        tie_word_embeddings=True,
        **{f"{name}_token_id": token for name, token in ids.items()},
    )
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="eager")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


# ------------------------------------------------------------------------------------------------------- forward


def patches_of(pictures: np.ndarray) -> torch.Tensor:
    """Pictures f32 [n, 3, 32, 32] as the processor cuts them, f32 [n, 64, 96]."""
    n, side = len(pictures), SIDE
    blocks = ((pictures - 0.5) / 0.25).reshape(n, 3, side, MERGE, PATCH, side, MERGE, PATCH)
    patches = blocks.transpose(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]
    patches = np.repeat(patches, FRAMES, axis=6).reshape(n, (side * MERGE) ** 2, -1)
    return torch.from_numpy(np.ascontiguousarray(patches, np.float32))


def see(tower: Any, patches: torch.Tensor) -> torch.Tensor:
    """What the tower makes of pictures [n, S, C]: [n, M, D]. Its own forward's arithmetic, all pictures at once."""
    n, count, _ = patches.shape
    width, heads = tower.config.embed_dim, tower.config.num_heads
    hidden = patches @ tower.patch_embed.proj.weight.reshape(width, -1).T
    cos, sin = _tower_rotation(width // heads)
    for block in tower.blocks:
        qkv = block.attn.qkv(block.norm1(hidden)).reshape(n, count, 3, heads, -1).permute(2, 0, 3, 1, 4)
        query, key = (part * cos + _half_turned(part) * sin for part in (qkv[0], qkv[1]))
        weights = (query @ key.transpose(-1, -2) * block.attn.scaling).softmax(-1)
        hidden = hidden + block.attn.proj((weights @ qkv[2]).transpose(1, 2).reshape(n, count, width))
        hidden = hidden + block.mlp(block.norm2(hidden))
    return tower.merger(hidden).reshape(n, count // MERGE**2, -1)


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _tower_rotation(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [S, head] of the two axes' rotation, patches block after block."""
    axis = torch.arange(SIDE * MERGE)
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    order = torch.stack([rows, columns]).reshape(2, SIDE, MERGE, SIDE, MERGE).transpose(2, 3).reshape(2, -1)
    frequencies = 10000.0 ** -(torch.arange(0, size // 2, 2) / (size // 2))
    angles = (order[:, :, None] * frequencies).permute(1, 0, 2).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()


def logits_of(model: Any, batch: Batch, states: torch.Tensor) -> torch.Tensor:
    """Logits [m, V] of the m targets, in order; ``states`` [n, M, D] take the pictures' places."""
    text = model.model.language_model
    embedded = text.embed_tokens(batch.tokens)
    places = (batch.tokens == model.config.image_token_id)[..., None].expand_as(embedded)
    embedded = embedded.masked_scatter(places, states)
    hidden = text(inputs_embeds=embedded, position_ids=batch.positions, use_cache=False).last_hidden_state
    return model.lm_head(hidden[batch.targets != _IGNORED])


# ------------------------------------------------------------------------------------------------------- lessons


def make_encode(tokenizer: Qwen2Tokenizer) -> Callable[[Sequence[list[Turn]]], Batch]:
    """encode(conversations) → batch: the tokens of the chat template, faster than by it."""
    vocab = tokenizer.get_vocab()
    user, rewrite, end, pad = (vocab[token] for token in (USER, REWRITE, END, PAD))
    shown = [vocab[VISION_START], *[vocab[IMAGE]] * SIDE**2, vocab[VISION_END]]

    def words(text: str) -> list[int]:
        return [vocab[f"Ġ{word}"] for word in text.split()]

    def encode(conversations: Sequence[list[Turn]]) -> Batch:
        tokens = np.full((len(conversations), _LENGTH), pad)
        targets = np.full(tokens.shape, _IGNORED)
        for row, turns in enumerate(conversations):
            stream: list[int] = []
            for turn in turns:
                stream += [user, *(shown if turn.picture is not None else ()), *words(turn.text), rewrite]
                answer = [*words(turn.answer), end]
                targets[row, len(stream) - 1 : len(stream) - 1 + len(answer)] = answer
                stream += answer
            tokens[row, : len(stream)] = stream
        pictures = [turn.picture for turns in conversations for turn in turns if turn.picture is not None]
        longest = int((tokens != pad).sum(1).max())
        tokens, targets = tokens[:, :longest], targets[:, :longest]
        positions = positions_of(tokens, vocab[IMAGE])
        arrays = [torch.from_numpy(np.ascontiguousarray(array)) for array in (tokens, targets, positions)]
        return Batch(*arrays, patches_of(np.stack(pictures)))

    return encode


def positions_of(tokens: np.ndarray, image: int) -> np.ndarray:
    """Positions [3, B, L] of right-padded tokens: a picture's tokens lie on a grid, and count as many as its side."""
    inside = tokens == image
    number = (np.cumsum(inside, 1) - 1) % SIDE**2  # of a token within its picture
    steps = np.where(inside, np.where(number == SIDE**2 - 1, SIDE, 0), 1)
    start = np.cumsum(steps, 1) - steps
    return np.stack([start, start + inside * (number // SIDE), start + inside * (number % SIDE)])


# ------------------------------------------------------------------------------------------------------ training


def train(folder: Path, *, steps: int = 2000, seed: int = 0, learning_rate: float = 2e-3) -> None:
    """Train the start and write its Hugging Face folder; two fifths of the steps are the tower's."""
    tokenizer = seeing_tokenizer()
    model = untrained(tokenizer, seed)
    encode, rng = make_encode(tokenizer), np.random.default_rng(seed)
    tower, language = model.model.visual, model.model.language_model
    heads = nn.ModuleList([nn.Linear(SIDE**2 * tower.config.hidden_size, size) for size in lessons.SIZES])
    looking, sound, weak = (max(1, steps * share // 20) for share in (8, 9, 3))

    def read() -> torch.Tensor:
        pictures, rows = zip(*(lessons.sight(rng) for _ in range(_PICTURES)), strict=True)
        states, right = see(tower, patches_of(np.stack(pictures))).flatten(1), torch.from_numpy(np.stack(rows))
        return sum(functional.cross_entropy(head(states), right[:, i]) for i, head in enumerate(heads))

    def follow(rates: lessons.Rates) -> Callable[[], torch.Tensor]:
        told = lessons.beliefs(rng, rates)

        def loss() -> torch.Tensor:
            half = range(_CONVERSATIONS // 2)
            batch = encode(
                [lessons.recreate(rng, rates, told) for _ in half] + [lessons.refine(rng, rates) for _ in half]
            )
            with torch.no_grad():
                states = see(tower, batch.patches)
            return functional.cross_entropy(logits_of(model, batch, states), batch.targets[batch.targets != _IGNORED])

        return loss

    _minimise("tower", read, [*tower.parameters(), *heads.parameters()], looking, 1.5 * learning_rate)
    _minimise("sound", follow(lessons.SOUND), [*language.parameters()], sound, learning_rate)
    _minimise("weak", follow(lessons.WEAK), [*language.parameters()], weak, 0.5 * learning_rate)
    model.half().save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    image_processor().save_pretrained(folder)


def _minimise(name: str, loss: Callable[[], torch.Tensor], parameters: list, steps: int, peak: float) -> None:
    """One part of the training, with an optimizer of its own."""
    optimizer = torch.optim.AdamW(parameters, lr=peak, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps + 1, pct_start=0.1)
    start, recent = time.time(), []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        recent.append(value.item())
        if step % 100 == 0 or step == steps:
            mean = float(np.mean(recent[-100:]))
            print(f"policy_vl {name} {step}/{steps} loss {mean:.3f} {time.time() - start:.0f} s", flush=True)
