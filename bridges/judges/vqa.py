"""P("Yes"): what a model that sees pictures answers to a question about one (Lin et al. 2024, arXiv:2404.01291)."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from bridges.clip import ScoreError
from bridges.loading import load_complete, load_config, load_part, torch_device
from bridges.loading import torch_dtype as dtype_of
from bridges.pixels import to_pillow
from grpo_jax.errors import UserError

PROMPT = "{prompt}"
"""In a question, the place of the user's prompt."""


class Answerer:
    """A loaded image-text-to-text model; make one with `load_answerer`.

    Attributes:
        device: Where it runs, and where its scores are.
        name: As it was asked for.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        question: str,
        answer: str,
        batch_size: int,
    ):
        """Takes the parts as `load_answerer` makes them."""
        self.device, self.name = device, name
        self._model, self._processor, self._dtype = model, processor, dtype
        self._question, self._batch_size = question, batch_size
        self._answer = processor.tokenizer(answer, add_special_tokens=False, return_tensors="pt").input_ids
        # logits of the answer's places alone, not of every token of every picture
        self._few = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def summary(self) -> str:
        """One line for the opening of a run."""
        answer = self._processor.tokenizer.decode(self._answer[0])
        return f"{self.name}: {type(self._model).__name__}, P({answer!r}), on {self.device}"

    def image_text(self, images: torch.Tensor, texts: list[str]) -> torch.Tensor:
        """How surely each picture [B, 3, H, W] shows its text: `yes` to the question made of it; float32 [B]."""
        return self.yes(images, [self._question.replace(PROMPT, text) for text in texts])

    def yes(self, images: torch.Tensor, questions: list[str]) -> torch.Tensor:
        """The probability that the model's reply to each question begins with the answer.

        Args:
            images: Float [B, 3, H, W] in [0, 1], on any device.
            questions: B texts.

        Returns:
            float32 [B] in [0, 1], among all replies there are: it need not be 1 less that of a "No".

        Raises:
            ValueError: There is not one question for each picture.
            ScoreError: A probability is not finite.
        """
        if len(images) != len(questions):
            raise ValueError(f"questions: expected one for each of {len(images)} images, got {len(questions)}")
        found = [torch.zeros(0, device=self.device)]
        for start in range(0, len(questions), self._batch_size):
            rows = slice(start, start + self._batch_size)
            found.append(self._asked(images[rows], questions[rows]))
        scores = torch.cat(found)
        if not torch.isfinite(scores).all():
            raise ScoreError(f"{self.name}: the probability of an answer is not finite")
        return scores

    @torch.no_grad()
    def _asked(self, images: torch.Tensor, questions: list[str]) -> torch.Tensor:
        """`yes` of one batch."""
        inputs = self._inputs(images, questions)
        answer = self._answer.expand(len(questions), -1)
        length, count = inputs["input_ids"].shape[1], answer.shape[1]
        for name, values in inputs.items():  # masks and kinds of tokens stand beside them
            if name == "input_ids":
                inputs[name] = torch.cat([values, answer], dim=1)
            elif values.shape[:2] == (len(questions), length) and values.ndim == 2:
                more = torch.ones_like if name == "attention_mask" else torch.zeros_like
                inputs[name] = torch.cat([values, more(answer, dtype=values.dtype)], dim=1)
        few = {"logits_to_keep": count + 1} if self._few else {}
        logits = self._model(**inputs.to(self.device, self._dtype), use_cache=False, **few).logits
        told = logits[:, -count - 1 : -1].float().log_softmax(-1)
        return told.gather(2, answer.to(self.device)[..., None]).sum((1, 2)).exp()

    def _inputs(self, images: torch.Tensor, questions: list[str]) -> Any:
        """What the processor makes of pictures and questions, padded on the left: all end where the reply begins."""
        asked = [
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
            for question in questions
        ]
        texts = self._processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        return self._processor(
            text=texts,
            images=[[picture] for picture in to_pillow(images)],
            padding=True,
            add_special_tokens=False,  # the template writes them
            return_tensors="pt",
        )


def load_answerer(
    path: str,
    *,
    question: str,
    answer: str = "Yes",
    device: str | torch.device = "cpu",
    dtype: str = "bfloat16",
    batch_size: int = 8,
) -> Answerer:
    """Loads an image-text-to-text model with its processor.

    Args:
        path: Folder, or id on the hub.
        question: What is asked of a prompt, with {prompt} in its place.
        answer: What a reply begins with that says yes.
        device: "cpu" or "gpu:N".
        dtype: "float32", "float16" or "bfloat16".
        batch_size: Pictures looked at at once.

    Raises:
        UserError: There is no such model, it sees no pictures or has no chat template, or its weights are missing,
            broken, or no safetensors.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    target = torch_device(device)
    load_config(path)
    processor = load_part(AutoProcessor, path, "processor")
    if not hasattr(processor, "image_processor"):
        raise UserError(f"{path}: expected a model that sees pictures, its processor takes none")
    if not processor.chat_template:
        raise UserError(f"{path}: expected a model with a chat template, it holds none")
    processor.tokenizer.padding_side = "left"
    return Answerer(
        load_complete(AutoModelForImageTextToText, path, dtype=dtype).to(target),
        processor,
        name=path,
        device=target,
        dtype=dtype_of(dtype),
        question=question,
        answer=answer,
        batch_size=batch_size,
    )
