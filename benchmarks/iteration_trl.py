"""GRPO iterations of TRL's GRPOTrainer with transformers generation; a worker of grpo_iteration.py.

Words of a variant: "checkpointing" (gradient checkpointing), "bfloat16" (`bf16`: autocast over float32 weights), and
"narrow" (weights and moments in bfloat16). The phases are timed by wrapping the trainer's methods. It runs on a GPU
where torch sees one: grpo_iteration.py hides them, benchmarks/gpu does not.
"""

from __future__ import annotations

import iteration_work as work
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

CUDA = torch.cuda.is_available()


class Timed(GRPOTrainer):
    """The trainer with a stopwatch around generation and the reference's log-probabilities."""

    def __init__(self, *args, now, **kwargs):
        self.rows: list[dict[str, float]] = []
        self.now = (lambda: (torch.cuda.synchronize(), now())[1]) if CUDA else now
        super().__init__(*args, **kwargs)

    def _generate(self, *args, **kwargs):
        start = self.now()
        written = super()._generate(*args, **kwargs)
        self.rows[-1]["sampling"] += self.now() - start
        return written

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        start = self.now()
        seen = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if not torch.is_grad_enabled():  # the reference's pass; the policy's own is part of the update
            self.rows[-1]["logprobs"] += self.now() - start
        return seen


class Stopwatch(TrainerCallback):
    """One row per optimizer step: with num_iterations = 1 that is one iteration."""

    trainer: Timed
    start: float

    def on_step_begin(self, *_, **__):
        self.start = self.trainer.now()
        self.trainer.rows.append(dict.fromkeys(("sampling", "logprobs"), 0.0))

    def on_step_end(self, *_, **__):
        self.trainer.rows[-1]["total"] = self.trainer.now() - self.start


def make_dataset(given: work.Assignment) -> Dataset:
    """The prompts of all iterations; with pictures they are messages, as its users write them."""
    case = given.case
    texts = [text for i in range(given.iterations) for text in work.prompt_texts(case, i)]
    if not case.picture:
        return Dataset.from_dict({"prompt": texts})
    images = [Image.fromarray(one) for i in range(given.iterations) for one in work.pictures(case, i)]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": prompts, "image": images})


def weight_dtype(given: work.Assignment) -> str:
    return "bfloat16" if "narrow" in given.variant.split() else "float32"


def make_trainer(given: work.Assignment) -> Timed:
    case, words = given.case, given.variant.split()
    reader = AutoProcessor if case.picture else PreTrainedTokenizerFast
    # Outside the vocabulary nothing ends a completion, and no logits processor has to see to it.
    end = case.vocabulary + 1 if case.end is None else case.end

    def reward(completions, completion_ids, **_):
        trainer.rows[-1]["tokens"] = sum(map(len, completion_ids))
        if case.end is None and any(len(ids) != case.new_tokens for ids in completion_ids):
            raise RuntimeError("a completion ended early")
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return [work.reward(case, text) for text in texts]

    config = GRPOConfig(
        output_dir=str(given.out.with_suffix(".trainer")),
        per_device_train_batch_size=case.prompts * case.group,
        num_generations=case.group,
        max_completion_length=case.new_tokens,
        max_steps=given.iterations,
        num_iterations=1,
        beta=work.KL_COEF,
        learning_rate=case.learning_rate,
        lr_scheduler_type="constant",
        temperature=1.0,
        top_k=0,
        gradient_checkpointing="checkpointing" in words,
        model_init_kwargs={"dtype": weight_dtype(given)},
        generation_kwargs={"eos_token_id": end},
        bf16="bfloat16" in words,
        use_cpu=not CUDA,
        optim="adamw_torch_fused" if CUDA else "adamw_torch",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    stopwatch = Stopwatch()
    trainer = Timed(
        str(given.folder),
        reward,
        args=config,
        train_dataset=make_dataset(given),
        processing_class=reader.from_pretrained(str(given.folder)),
        callbacks=[stopwatch],
        now=given.now,
    )
    stopwatch.trainer = trainer
    trainer.eos_token_ids = [end]  # the mask does not end where the folder's end token comes either
    return trainer


if __name__ == "__main__":
    given = work.assignment()
    torch.set_num_threads(given.threads)
    trainer = make_trainer(given)
    trainer.train()
    dtypes = {str(parameter.dtype) for parameter in trainer.model.parameters()}
    if dtypes != {f"torch.{weight_dtype(given)}"}:
        raise RuntimeError(f"expected {weight_dtype(given)} weights, got {dtypes}")
    peak = torch.cuda.max_memory_allocated() if CUDA else None
    work.write_report(given, trainer.rows, ("trl", "transformers", "torch", "accelerate"), gpu_bytes=peak)
