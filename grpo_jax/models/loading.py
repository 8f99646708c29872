"""A policy from a Hugging Face folder with all one needs to sample from it and to train it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.models.decoder import Policy, make_policy
from grpo_jax.models.hf import load_folder
from grpo_jax.models.hf.tokens import chat_renderer, prompt_encoder
from grpo_jax.models.vision.pictures import VISUAL


class LanguagePolicy(NamedTuple):
    """A loaded language policy.

    Attributes:
        functions: Its pure functions: prefill, decode, forward_group, head, …
        params: Its weights, float32.
        config: The decoder's shape and choices.
        tokenizer: The folder's.
        eos_ids: Tokens that end a completion.
        pad_id: Token that fills up.
        visual: The weights of its vision tower, or None if it was not asked for.
    """

    functions: Policy
    params: dict[str, Any]
    config: Any
    tokenizer: Any
    eos_ids: tuple[int, ...]
    pad_id: int
    visual: dict[str, Any] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """What its functions take: the weights, and the vision tower's where it is loaded."""
        return {"params": self.params} | ({} if self.visual is None else {VISUAL: self.visual})

    def encode(self, prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Prompts as left-padded tokens i32 [P, L] and their mask bool [P, L], by the chat template if there is one.

        Marks such as ``<|im_end|>`` come from the template alone; in a prompt they are text.

        Raises:
            UserError: The chat template or the tokenizer fails, or a prompt cannot be encoded.
        """
        chat = bool(getattr(self.tokenizer, "chat_template", None))
        render = chat_renderer(self.tokenizer) if chat else str
        vocabulary = self.config.vocab_size
        encode = prompt_encoder(self.tokenizer, render, add_special_tokens=not chat, vocab_size=vocabulary)
        ids = [encode(prompt) for prompt in prompts]
        width = max(map(len, ids))
        tokens = np.full((len(ids), width), self.pad_id, np.int32)
        mask = np.arange(width) >= width - np.array([[len(row)] for row in ids])
        for row, entry in zip(tokens, ids, strict=True):
            row[width - len(entry) :] = entry
        return tokens, mask

    def decode(self, samples: Any) -> list[list[str]]:
        """Completions of a sampler as texts `[P][G]`, special tokens left out."""
        tokens, mask = jax.device_get((samples.tokens, samples.mask))
        return [
            [self.tokenizer.decode(row[real], skip_special_tokens=True) for row, real in zip(*group, strict=True)]
            for group in zip(tokens, mask, strict=True)
        ]


def load_policy(
    folder: str | Path,
    *,
    compute_dtype: str = "float32",
    remat: str = "products",
    vision: bool = False,
    matmul_precision: str | None = None,
) -> LanguagePolicy:
    """Loads a folder of one of the architectures in docs/policies.md.

    Args:
        folder: A local folder, or a hub id.
        compute_dtype: Type of the activations; the weights are float32.
        remat: What the backward pass computes again (`models.decoder.make_policy`).
        vision: Whether to load the vision tower too, where there is one.
        matmul_precision: Of products of matrices (`models.decoder.precision_of`).

    Raises:
        UserError: Something is missing, truncated, or of an unsupported kind; says how to mend it.
    """
    loaded = load_folder(folder, param_dtype="float32", vision=vision)
    functions = make_policy(loaded.config, compute_dtype=compute_dtype, remat=remat, matmul_precision=matmul_precision)
    return LanguagePolicy(
        functions, loaded.params, loaded.config, loaded.tokenizer, loaded.eos_ids, loaded.pad_id, loaded.visual
    )
