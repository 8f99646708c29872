"""Questions about pictures, answered by an image-text-to-text model (VQAScore, Lin et al. 2024, arXiv:2404.01291)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from bridges.judges import ModelJudge
from grpo_jax.config.fields import PositiveCount, require, resume_mutable

if TYPE_CHECKING:
    import torch
    from transformers import BatchFeature, PreTrainedModel, ProcessorMixin

PROMPT = "{prompt}"  # in a question, the place of the user's prompt


class Vqa(ModelJudge):
    """Score a picture by P("Yes"), the probability that a model's reply to a question about it begins with "Yes"."""

    auto = "AutoModelForImageTextToText"
    working_bytes = 2**30

    path: str
    """Folder or hub id of an image-text-to-text model of transformers with a chat template."""
    question: str = 'Does this picture show "{prompt}"? Please answer Yes or No.'
    """Question of a reward that compares a picture and a prompt, with {prompt} for the prompt."""
    answer: str = "Yes"
    """Beginning of a reply that means yes."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of its weights."""
    batch_size: PositiveCount = resume_mutable(8)
    """Pictures per batch."""

    def __post_init__(self) -> None:
        require(PROMPT in self.question, "question", "a text with {prompt} in it", self.question)
        require(bool(self.answer.strip()), "answer", "a word", self.answer)

    def load(self, device: str) -> Answerer:
        """Load the model with its processor on "cpu" or "gpu:N".

        UserError without such a model, pictures, a chat template, or all weights as safetensors.
        """
        from transformers import AutoModelForImageTextToText, AutoProcessor

        from bridges.loading import load_complete, load_part

        processor = load_part(AutoProcessor, self.path, "processor")
        sees = hasattr(processor, "image_processor")
        require(sees, self.path, "a model that sees pictures", type(processor).__name__)
        require(processor.chat_template, self.path, "a model with a chat template", None)
        thinks = _texts(processor, ["?"])[0].rstrip().endswith("<think>")
        require(not thinks, self.path, "a model that replies without thinking", "a chat template that opens a thought")
        processor.tokenizer.padding_side = "left"  # so that all rows end before the reply
        model = load_complete(AutoModelForImageTextToText, self.path, dtype=self.dtype, device=device)
        return Answerer(self, model, processor)


class Answerer:
    """A loaded image-text-to-text model."""

    def __init__(self, config: Vqa, model: PreTrainedModel, processor: ProcessorMixin):
        self.device = model.device
        self.name = config.path
        self._config = config
        self._model = model
        self._processor = processor
        self._answer = processor.tokenizer(config.answer, add_special_tokens=False, return_tensors="pt").input_ids
        # logits only at the reply's positions, not at every token of every picture
        self._few = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __str__(self) -> str:
        answer = self._processor.tokenizer.decode(self._answer[0])
        return f"{self.name}: {type(self._model).__name__}, P({answer!r}), on {self.device}"

    def image_text(self, images: torch.Tensor, texts: list[str]) -> torch.Tensor:
        """Return `yes` for the question of each text about its picture [B, 3, H, W]; float32 [B]."""
        return self.yes(images, [self._config.question.replace(PROMPT, text) for text in texts])

    def yes(self, images: torch.Tensor, questions: list[str]) -> torch.Tensor:
        """Return the probability that the model's reply to each of B questions begins with the answer, float32 [B].

        It is that among all possible replies, and need not be 1 minus that of "No". Pictures are float [B, 3, H, W] in
        [0, 1], on any device.
        """
        return self._over_batches(len(questions), lambda rows: self._probabilities(images[rows], questions[rows]))

    def begins(self, images: torch.Tensor, questions: list[str], answers: list[list[str]]) -> torch.Tensor:
        """Return the probability that the reply's first token begins one of the question's answers, float32 [B].

        Arguments are those of `yes`, and the spellings of the right answer per question.
        """
        import torch

        tokenizer = self._processor.tokenizer
        begun = [[tokenizer(text, add_special_tokens=False).input_ids[0] for text in texts] for texts in answers]
        first = [{one for one in row if tokenizer.decode(one).strip()} for row in begun]  # a blank begins any number

        def batch(rows: slice) -> torch.Tensor:
            chances = self._logits(self._inputs(images[rows], questions[rows]), 1)[:, -1].softmax(-1)
            return torch.stack([row[sorted(ids)].sum() for row, ids in zip(chances, first[rows], strict=True)])

        return self._over_batches(len(questions), batch)

    def _over_batches(self, count: int, one: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Concatenate one(rows), float32 [rows], over the batches of `count` questions."""
        import torch

        size = self._config.batch_size
        with torch.no_grad():
            batches = [one(slice(start, start + size)) for start in range(0, count, size)]
        return torch.cat([torch.zeros(0, device=self.device), *batches])

    def _probabilities(self, images: torch.Tensor, questions: list[str]) -> torch.Tensor:
        """Compute `yes` for one batch."""
        import torch

        inputs = self._inputs(images, questions)
        answer = self._answer.expand(len(questions), -1)
        shape = inputs["input_ids"].shape
        for name, values in inputs.items():  # also masks and token types
            if name == "input_ids":
                inputs[name] = torch.cat([values, answer], dim=1)
            elif values.shape == shape:
                more = torch.ones_like if name == "attention_mask" else torch.zeros_like
                inputs[name] = torch.cat([values, more(answer, dtype=values.dtype)], dim=1)
        logprobs = self._logits(inputs, answer.shape[1] + 1)[:, :-1].log_softmax(-1)
        return logprobs.gather(2, answer.to(self.device)[..., None]).sum((1, 2)).exp()

    def _logits(self, inputs: BatchFeature, last: int) -> torch.Tensor:
        """Return the float32 logits of the last `last` positions."""
        few = {"logits_to_keep": last} if self._few else {}
        # only floats are cast to the weights' dtype
        logits = self._model(**inputs.to(self.device, self._model.dtype), use_cache=False, **few).logits
        return logits[:, -last:].float()

    def _inputs(self, images: torch.Tensor, questions: list[str]) -> BatchFeature:
        """Return the processor's inputs for pictures and questions."""
        from bridges.pixels import to_pillow

        return self._processor(
            text=_texts(self._processor, questions),
            images=[[picture] for picture in to_pillow(images)],
            padding=True,
            add_special_tokens=False,  # the template adds them
            return_tensors="pt",
        )


def _texts(processor: ProcessorMixin, questions: list[str]) -> list[str]:
    """Return the questions in the chat template, each about a picture, with thinking switched off."""
    asked = [[{"type": "image"}, {"type": "text", "text": question}] for question in questions]
    options = {"enable_thinking": False} if "enable_thinking" in processor.chat_template else {}
    messages = [[{"role": "user", "content": content}] for content in asked]
    return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
