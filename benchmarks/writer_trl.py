"""A run of TRL's GRPOTrainer on the job of small_writer.py, whose worker it is.

It continues the adapter of a folder that has the run's config too; TRL's reference is a frozen copy of that adapter.
Requests come in our order. Our own functions draw, score and measure. An invalid answer is scored as the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import reward_work as task
import torch
from datasets import Dataset
from peft import PeftModel
from reward_greedy import answers
from reward_trl import Watch, settings
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from grpo_jax.config.run import Config
from grpo_jax.rollout.data import Row, batch_at
from grpo_jax.rollout.reward_registry import bind
from grpo_jax.rollout.rewards import collect_rewards
from grpo_jax.runs.loading import load_data
from grpo_jax.runs.policy import run_config
from grpo_jax.tasks.rewriting import parse_rewrite


class Judges:
    """The run's renderer, CLIP, rewards and pixel checker, also as TRL's reward functions; the checker weighs 0."""

    def __init__(self, config: Config):
        self.data, resolved = load_data(config, print, None, {})
        judges = {name: judge.load("cpu") for name, judge in config.judges.items()}
        self.render = self.data.render(judges, resolved.argument_names)
        functions = (*resolved.maximised, *resolved.evaluated)
        self.rewards = {function.name: bind(function, judges) for function in functions}
        self.weights = [resolved.weights.get(name, 0.0) for name in self.rewards]
        self.step, self.scores = -1, np.empty(0)

    def score(self, rows: Sequence[Row], written: Sequence[str], iteration: int, *, evaluation: bool) -> np.ndarray:
        """Return rewards and pixel accuracy f32 [P, G, N + 1] of P·G answers."""
        group = len(written) // len(rows)
        repeated = [row for row in rows for _ in range(group)]
        texts = [parse_rewrite(answer, row.prompt).text for answer, row in zip(written, repeated, strict=True)]
        groups = [texts[start : start + group] for start in range(0, len(texts), group)]
        images = self.render(rows, groups, iteration, evaluation).images
        columns = {"images": images, "requested": [row.columns["requested"] for row in repeated]}
        return collect_rewards(self.rewards, [row.prompt for row in repeated], texts, columns, group)

    def functions(self, group: int) -> list[Callable[..., list[float]]]:
        """Return a function for each reward and the measure; the first that TRL calls scores the batch for all."""

        def make(place: int, name: str) -> Callable[..., list[float]]:
            def reward(completions, row, trainer_state, **_):
                if self.step != trainer_state.global_step:
                    self.step = trainer_state.global_step
                    rows = [self.data.prompts.train[number] for number in row[::group]]
                    texts = [message["content"] for (message,) in completions]
                    self.scores = self.score(rows, texts, self.step, evaluation=False)
                return self.scores[..., place].ravel().tolist()

            reward.__name__ = name
            return reward

        return [make(*item) for item in enumerate(self.rewards)]


def make_trainer(given: task.Assignment, config: Config, judges: Judges, stopwatch: task.Stopwatch) -> GRPOTrainer:
    group, size, train = config.sampling.group_size, config.training.prompts_per_batch, judges.data.prompts.train
    batches = [batch_at(given.seed, step, batch_size=size, n=len(train)).tolist() for step in range(given.steps)]
    places = [*chain.from_iterable(batches)]
    columns = {"prompt": [task.chat(train[place].prompt) for place in places], "row": places}
    args = settings(
        given,
        per_device_train_batch_size=size * group,
        num_generations=group,
        max_completion_length=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        epsilon=config.algorithm.clip_low,
        epsilon_high=config.algorithm.clip_high,
        beta=config.algorithm.kl_coef,
        use_bias_correction_kl=config.algorithm.kl_corrected,
        entropy_coef=config.algorithm.entropy_coef,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.optimizer.schedule,
        warmup_steps=config.optimizer.warmup_steps,
        reward_weights=judges.weights,
        multi_objective_aggregation="normalize_then_sum",
    )
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, given.variant, is_trainable=True)
    rewards, watch = judges.functions(group), Watch(stopwatch, ["pixel_accuracy"])
    return GRPOTrainer(model, rewards, args=args, train_dataset=Dataset.from_dict(columns), callbacks=[watch])


def held_out(folder: Path, adapter: Path, config: Config, judges: Judges) -> float:
    """Return the pixel accuracy of greedy answers to the held-out requests, by transformers and PEFT."""
    rows = judges.data.prompts.test[: config.evaluation.prompts]
    texts = answers(folder, adapter, [{"prompt": row.prompt} for row in rows], config.sampling.max_new_tokens)
    return float(judges.score(rows, texts, 0, evaluation=True)[..., -1].mean())


if __name__ == "__main__":
    given = task.assignment()  # the variant is the adapter's folder
    torch.set_num_threads(1)
    stopwatch, config = task.Stopwatch(given), run_config(Path(given.variant).parent)
    judges = Judges(config)
    trainer = make_trainer(given, config, judges, stopwatch)
    began = task.cpu_seconds()
    trainer.train()
    trainer.save_model()
    adapters = {"before": Path(given.variant), "after": Path(trainer.args.output_dir)}
    accuracies = {when: held_out(given.folder, adapter, config, judges) for when, adapter in adapters.items()}
    stopwatch.write(("trl", "transformers", "torch", "peft", "accelerate"), began=began, **accuracies)
