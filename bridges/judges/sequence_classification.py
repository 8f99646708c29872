"""Reward models: `AutoModelForSequenceClassification` of transformers, as in TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridges.judges import ModelJudge
from grpo_jax.config.fields import PositiveCount, require, resume_mutable

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Message = Mapping[str, str | list[Mapping[str, str]]]
"""A chat message, whose content is a text or a list of parts."""


class SequenceClassification(ModelJudge):
    """Score an answer to its prompt with a reward model; the judge's name is a reward."""

    auto = "AutoModelForSequenceClassification"
    working_bytes = 2**29

    path: str
    """Folder or hub id of an `AutoModelForSequenceClassification`."""
    label: str = ""
    """Output that is the reward, if the model has several; empty for its only one."""
    batch_size: PositiveCount = resume_mutable(16)
    """Texts per batch."""
    max_tokens: PositiveCount = 4096
    """Most tokens of a prompt with its answer; a longer text loses its beginning."""

    def check_config(self, config: PretrainedConfig) -> None:
        """Refuse a model without such a label."""
        self._column(config)

    def load(self, device: str) -> RewardModel:
        """Load the model on "cpu" or "gpu:N"; UserError without such a model, label or safetensors."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from bridges.loading import load_complete, load_config, load_part

        config = load_config(self.path)
        column = self._column(config)
        tokenizer = load_part(AutoTokenizer, self.path, "tokenizer", padding_side="right", truncation_side="left")
        model = load_complete(AutoModelForSequenceClassification, self.path, dtype=self.dtype, device=device)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        # a decoder's score is read at the last token that is not padding
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        limits = (self.max_tokens, tokenizer.model_max_length, getattr(config, "max_position_embeddings", 2**31))
        return RewardModel(self, model, tokenizer, model.device, column, int(min(limits)))

    def _column(self, config: PretrainedConfig) -> int:
        """Return the index of the model's output for the reward."""
        names = list(config.id2label.values())
        if len(names) == 1 and not self.label:
            return 0
        require(self.label in names, "label", f"one of the {len(names)} outputs, {', '.join(names)}", self.label)
        return names.index(self.label)


@dataclass(eq=False, repr=False)
class RewardModel:
    """A loaded reward model, itself a reward; `_column` is the output for it."""

    _config: SequenceClassification
    _model: PreTrainedModel
    _tokenizer: PreTrainedTokenizerBase
    device: torch.device
    _column: int
    _max_length: int

    def __str__(self) -> str:
        form = "its chat template" if self._tokenizer.chat_template else "pairs"
        return f"{self._config.path}: {type(self._model).__name__}, {form}, {self._max_length} tokens, on {self.device}"

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        *,
        prompt_messages: Sequence[Sequence[Message]] | None = None,
        completion_messages: Sequence[Sequence[Message]] | None = None,
        **columns: object,
    ) -> torch.Tensor:
        """Return the model's score of each completion for its prompt, float32 [B]; the caller refuses NaN.

        `prompt_messages` are the B prompts as conversations, lists of chat messages; `completion_messages` their
        continuations, with several turns and observations. None for the texts alone.
        """
        import torch

        asked = prompt_messages or [[{"role": "user", "content": prompt}] for prompt in prompts]
        answers = completion_messages or [[{"role": "assistant", "content": text}] for text in completions]
        rows = [self._texts([*start, *end]) for start, end in zip(asked, answers, strict=True)]
        scores = torch.zeros(len(rows), device=self.device)
        order = sorted(range(len(rows)), key=lambda row: sum(map(len, rows[row])))  # reduces padding
        size = self._config.batch_size
        for start in range(0, len(rows), size):
            batch = order[start : start + size]
            inputs = self._tokenizer(
                *(list(texts) for texts in zip(*(rows[row] for row in batch), strict=True)),
                add_special_tokens=not self._tokenizer.chat_template,  # a template adds them
                padding=True,
                truncation=True,
                max_length=self._max_length,
                return_tensors="pt",
            )
            with torch.no_grad():
                scores[batch] = self._model(**inputs.to(self.device)).logits[:, self._column].float()
        return scores

    def _texts(self, conversation: Sequence[Message]) -> tuple[str, ...]:
        """Render a conversation by the chat template; without one, return all before the answer, and the answer."""
        messages = []
        for message in conversation:
            content = message["content"]  # a text, or parts, among them pictures
            text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            messages.append({**message, "content": text})
        if self._tokenizer.chat_template:
            return (self._tokenizer.apply_chat_template(messages, tokenize=False),)
        *before, answer = (message["content"] for message in messages)
        return "\n\n".join(before), answer
