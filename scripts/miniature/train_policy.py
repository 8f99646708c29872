"""Make the miniature's initial policy by SFT with the library's own trainer.

It starts like a pretrained model: it knows the form of a canonical caption, and has seen the casual words. SFT
gives each of them the right meaning in three cases of ten, the same wrong meaning in four, and a random one in the
rest, and shows captions with missing attributes. The likeliest answer is therefore mostly wrong, so any gain of
reinforcement learning is learned, not sharpened.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import jax
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from bridges.miniature import world
from grpo_jax.config.sections import OptimizerSection
from grpo_jax.core import losses
from grpo_jax.models.hf import folder as hf
from grpo_jax.models.policy import Policy, load_policy
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import make_forward, make_supervised_objective
from grpo_jax.training.state import init_state, make_optimizer, make_schedule
from grpo_jax.training.update import make_train_step
from scripts.miniature import lessons, speech, vocabulary

PAD, END, USER, REWRITE = "<|pad|>", "<|end|>", "<|user|>", "<|rewrite|>"
CHAT_TEMPLATE = (
    "{% if tools %}<|user|>{% for tool in tools %} {{ tool['function']['name'] }}"
    "({{ tool['function']['parameters']['properties'] | join(', ') }}){% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|rewrite|> {{ message['content'] }}<|end|>"
    "{% else %}<|user|> {{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|rewrite|>{% endif %}"
)

RIGHT, WRONG = 0.30, 0.40
"""Shares of the right and of the one wrong meaning in what the policy is told of a casual word."""

KEPT = {"shape": 0.9, "colour": 0.9, "size": 0.75, "position": 0.75, "background": 0.75, "sharpness": 0.75}
"""How often the captions it learns from mention an attribute that was asked for; for others, half of it."""

_PROMPT_LENGTH, _COMPLETION_LENGTH = 16, 12


def policy_tokenizer(words: Collection[str]) -> Qwen2Tokenizer:
    """A byte-level Qwen2 tokenizer in which every one of ``words``, after a space, is one token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=5000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(sorted(words), trainer)
    model = json.loads(backend.to_str())["model"]
    vocab = model["vocab"] | {token: len(model["vocab"]) + i for i, token in enumerate((PAD, END, USER, REWRITE))}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(pair) for pair in model["merges"]],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, REWRITE],
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode_prompts(tokenizer, prompts: list[str], length: int = _PROMPT_LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Chat-formatted prompts, left-padded to ``length``: tokens i32[P, L] and mask bool[P, L]."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in prompts
    ]
    batch = tokenizer(texts, padding="max_length", max_length=length, add_special_tokens=False)
    return np.array(batch["input_ids"], np.int32), np.array(batch["attention_mask"], bool)


def beliefs(
    rng: np.random.Generator, values: Iterable[tuple[str, ...]], synonyms: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """The fixed wrong meaning of every casual word: another value of the same attribute."""
    wrong = {}
    for alike in values:
        for value in alike:
            others = [other for other in alike if other != value]
            wrong |= {word: others[rng.integers(len(others))] for word in synonyms[value]}
    return wrong


def meaning(rng: np.random.Generator, values: tuple[str, ...], word: str, right: str, wrong: dict[str, str]) -> str:
    """Return a lesson's meaning of ``word``, one of ``values``."""
    draw = rng.random()
    if draw < RIGHT:
        return right
    if draw < RIGHT + WRONG:
        return wrong[word]
    return str(rng.choice(values))


def lesson(rng: np.random.Generator, wrong: dict[str, str]) -> tuple[str, str]:
    """One training pair: a casual prompt of the training split and a half-right, often incomplete caption."""
    scene = speech.sample_scene(rng, "train")
    requested = {k: getattr(scene, k) for k in world.ATTRIBUTES if k in speech.ALWAYS_REQUESTED or rng.random() < 0.75}
    words = {k: speech.SYNONYMS[v][rng.integers(2)] for k, v in requested.items()}
    said = {}
    for name in world.ATTRIBUTES:
        keep = KEPT[name] if name in requested else 0.5 * KEPT[name]
        if rng.random() < keep:
            values = world.VALUES[name]
            said[name] = (
                meaning(rng, values, words[name], requested[name], wrong)
                if name in requested
                else str(rng.choice(values))
            )
    return speech.phrase(rng, words), lessons.caption_of(said)


def make_lesson(rng: np.random.Generator) -> Callable[[], tuple[str, str]]:
    """Return what gives lessons of the first world."""
    names = ("shape", "colour", "size", "position", "sharpness")
    wrong = beliefs(rng, (world.VALUES[name] for name in names), speech.SYNONYMS)
    return lambda: lesson(rng, wrong)


def _write_untrained(folder: Path, tokenizer: Qwen2Tokenizer, seed: int) -> None:
    """A Qwen2 folder with random weights in half precision."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).half()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)


def _batch(tokenizer, pairs: list[tuple[str, str]]) -> Batch:
    prompts, mask = encode_prompts(tokenizer, [prompt for prompt, _ in pairs])
    answers = tokenizer(
        [f" {answer}{END}" for _, answer in pairs],
        padding="max_length",
        padding_side="right",
        max_length=_COMPLETION_LENGTH,
        add_special_tokens=False,
    )
    tokens = np.array(answers["input_ids"], np.int32)[:, None]
    written = np.array(answers["attention_mask"], bool)[:, None]
    return Batch(prompts, mask, tokens, written)


def train(
    folder: Path,
    *,
    steps: int = 1000,
    seed: int = 0,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    words: Collection[str] = frozenset(vocabulary.world_words()),
    lessons_of: Callable[[np.random.Generator], Callable[[], tuple[str, str]]] = make_lesson,
) -> None:
    """Train the start on a world's words and lessons, and write its Hugging Face folder."""
    give_lesson = lessons_of(np.random.default_rng(seed))
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "policy"
        _write_untrained(source, policy_tokenizer(words), seed)
        loaded = load_policy(source)
        policy = Policy(loaded.config, remat="none")
        section = OptimizerSection(learning_rate=learning_rate, schedule="cosine", warmup_steps=100)
        optimizer = make_optimizer(section, make_schedule(section, steps))
        state = init_state({"params": loaded.params}, optimizer, keep_reference=False)
        step_function = make_train_step(
            make_supervised_objective(make_forward(policy, temperature=1.0)),
            optimizer,
            normaliser=lambda batch: losses.loss_normaliser(batch.mask, "token"),
        )
        start, recent = time.time(), []
        for step in range(1, steps + 1):
            pairs = [give_lesson() for _ in range(batch_size)]
            state, report = step_function(state, _batch(loaded.tokenizer, pairs))
            recent.append(report["loss"])
            if step % 100 == 0 or step == steps:
                mean = float(np.mean(jax.device_get(recent[-100:])))
                print(f"policy {step}/{steps} loss {mean:.3f} {time.time() - start:.0f} s", flush=True)
        hf.save_folder(folder, source, loaded.config, state.variables["params"])
