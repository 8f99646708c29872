"""Reward models: `AutoModelForSequenceClassification` of transformers on a prompt and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridges.loading import load_complete, load_config, load_part, local_folder, torch_device
from grpo_jax.errors import UserError


class RewardModel:
    """A loaded reward model, itself a reward; make one with `load_reward_model`.

    Attributes:
        device: Where it runs, and where its scores are.
        name: As it was asked for.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, name: str, device: torch.device, column: int, longest: int, batch_size: int
    ):
        """Takes the parts as `load_reward_model` makes them."""
        self.device, self.name = device, name
        self._model, self._tokenizer = model, tokenizer
        self._column, self._longest, self._batch_size = column, longest, batch_size

    @property
    def summary(self) -> str:
        """One line for the opening of a run."""
        form = "its chat template" if self._tokenizer.chat_template else "pairs"
        return f"{self.name}: {type(self._model).__name__}, {form}, {self._longest} tokens, on {self.device}"

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], *, messages: Any = None, **columns: Any
    ) -> torch.Tensor:
        """The reward: what the model gives each completion as the answer to its prompt.

        Args:
            prompts: B texts.
            completions: B texts.
            messages: B conversations in place of the prompts, where the data have them; lists of chat messages.
            **columns: Not looked at.

        Returns:
            float32 [B], as the model's head has it; NaN is refused by whoever asks.
        """
        conversations = messages or [[{"role": "user", "content": prompt}] for prompt in prompts]
        rows = [self._texts(asked, told) for asked, told in zip(conversations, completions, strict=True)]
        scores = torch.zeros(len(rows), device=self.device)
        order = sorted(range(len(rows)), key=lambda row: sum(map(len, rows[row])))  # little padding
        for start in range(0, len(rows), self._batch_size):
            batch = order[start : start + self._batch_size]
            inputs = self._tokenizer(
                *(list(texts) for texts in zip(*(rows[row] for row in batch), strict=True)),
                add_special_tokens=not self._tokenizer.chat_template,  # a template writes them
                padding=True,
                truncation=True,
                max_length=self._longest,
                return_tensors="pt",
            )
            with torch.no_grad():
                scores[batch] = self._model(**inputs.to(self.device)).logits[:, self._column].float()
        return scores

    def _texts(self, asked: list[dict[str, Any]], told: str) -> tuple[str, ...]:
        """A conversation and its answer as the chat template writes them; without one, a pair of texts."""
        said = [{**message, "content": _text_of(message["content"])} for message in asked]
        if not self._tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in said), told
        said.append({"role": "assistant", "content": told})
        return (self._tokenizer.apply_chat_template(said, tokenize=False),)


def _text_of(content: Any) -> str:
    """A message's text; its pictures are not seen."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def check_reward_model(path: str, label: str) -> None:
    """Refuses a folder that is no classifier with this label; of a model on the hub nothing is read.

    Raises:
        UserError: Saying which labels there are.
    """
    if local_folder(path) is not None:
        _column(path, load_config(path), label)


def load_reward_model(
    path: str,
    *,
    label: str = "",
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    batch_size: int = 16,
    max_tokens: int = 4096,
) -> RewardModel:
    """Loads a reward model with its tokenizer.

    Args:
        path: Folder, or id on the hub.
        label: Which of several outputs is the reward; "" for the only one.
        device: "cpu" or "gpu:N".
        dtype: "float32", "float16" or "bfloat16".
        batch_size: Texts read at once.
        max_tokens: Of a prompt with its answer, at most what the model has positions for.

    Raises:
        UserError: There is no such model or label, or its weights are missing, broken, or no safetensors.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    config, target = load_config(path), torch_device(device)
    column = _column(path, config, label)
    tokenizer = load_part(AutoTokenizer, path, "tokenizer", padding_side="right", truncation_side="left")
    model = load_complete(AutoModelForSequenceClassification, path, dtype=dtype).to(target)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # decoders read the last that is no padding
    limits = (max_tokens, tokenizer.model_max_length, getattr(config, "max_position_embeddings", max_tokens))
    return RewardModel(
        model,
        tokenizer,
        name=path,
        device=target,
        column=column,
        longest=int(min(limits)),
        batch_size=batch_size,
    )


def _column(path: str, config: Any, label: str) -> int:
    """Which of the model's outputs is the reward."""
    names = list(config.id2label.values())
    if len(names) == 1 and not label:
        return 0
    if label not in names:
        raise UserError(f"{path}: it has {len(names)} outputs; say which as label: one of {', '.join(names)}")
    return names.index(label)
