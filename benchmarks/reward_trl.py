"""A run of TRL's GRPOTrainer with PEFT's LoRA; a worker of time_to_reward.py and reasoning_gym_tasks.py.

Variants: "plain", and "checkpointing" (gradient checkpointing). Several rewards are `normalize_then_sum`, TRL's GDPO.
`writer_trl.py` changes the settings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import reward_work as task
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Watch(TrainerCallback):
    """Reads the trainer's log of each step: `reward`, and the mean of each function in `measures`."""

    def __init__(self, stopwatch: task.Stopwatch, measures: Sequence[str] = (), reward: str = "reward"):
        self.stopwatch, self.measures, self.reward = stopwatch, measures, reward

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in logs:
            means = {name: float(logs[f"rewards/{name}/mean"]) for name in self.measures}
            self.stopwatch.step(float(logs[self.reward]), **means)


def settings(given: task.Assignment, **changes: object) -> GRPOConfig:
    """TRL's settings: those of the sums, with changes."""
    values = dict(
        output_dir=str(given.out.with_suffix(".trainer")),
        seed=given.seed,
        per_device_train_batch_size=task.PROMPTS * task.GROUP,
        num_generations=task.GROUP,
        max_completion_length=given.new_tokens,
        max_steps=given.steps,
        num_iterations=1,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        learning_rate=task.RATE,
        lr_scheduler_type="constant",
        adam_beta1=task.BETA1,
        adam_beta2=task.BETA2,
        weight_decay=0.0,
        max_grad_norm=task.CLIP_NORM,
        temperature=given.temperature,
        top_p=1.0,
        top_k=0,
        gradient_checkpointing=given.variant == "checkpointing",
        bf16=False,
        use_cpu=True,
        optim="adamw_torch",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    return GRPOConfig(**(values | changes))


def make_trainer(given: task.Assignment, stopwatch: task.Stopwatch) -> GRPOTrainer:
    # In the order in which grpo_jax draws them with this seed.
    rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["prompt"] = [task.chat(prompt) for prompt in columns["prompt"]]
    changes = {"multi_objective_aggregation": "normalize_then_sum"} if len(given.functions) > 1 else {}
    first, *others = [function.__name__ for function in given.functions]
    return GRPOTrainer(
        str(given.folder),
        given.functions,
        args=settings(given, model_init_kwargs={"dtype": "float32"}, **changes),
        train_dataset=Dataset.from_dict(columns),
        peft_config=LoraConfig(
            r=task.RANK, lora_alpha=task.ALPHA, target_modules=list(task.TARGETS), task_type="CAUSAL_LM"
        ),
        callbacks=[Watch(stopwatch, others, f"rewards/{first}/mean")],
    )


if __name__ == "__main__":
    given = task.assignment()
    torch.set_num_threads(1)
    stopwatch = task.Stopwatch(given)
    trainer = make_trainer(given, stopwatch)
    trainer.train()
    trainer.save_model()
    stopwatch.write(("trl", "transformers", "torch", "peft", "accelerate"))
