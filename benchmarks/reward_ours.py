"""A run of grpo_jax by `grpo_jax.run`; a worker of time_to_reward.py and reasoning_gym_tasks.py.

Variants: values of `policy.remat`. Several rewards have GDPO's advantages.
"""

from __future__ import annotations

import reward_work as task

from grpo_jax import make_config, run
from grpo_jax.config.run import Config
from grpo_jax.runs.session import IterationEvent


def config_of(given: task.Assignment) -> Config:
    """The run's config; its AdamW has task.BETA1 always."""
    lora = {"rank": task.RANK, "alpha": task.ALPHA, "targets": list(task.TARGETS)}
    advantage = {"advantage": "grpo", "scale": "group"} if len(given.functions) == 1 else {"advantage": "gdpo"}
    return make_config(
        task="text",
        run_dir=str(given.out.with_suffix(".run")),
        seed=given.seed,
        policy={"path": str(given.folder), "lora": lora, "remat": given.variant},
        data={"prompts": str(given.rows), "held_out": 0.0},
        sampling={"group_size": task.GROUP, "max_new_tokens": given.new_tokens, "temperature": given.temperature},
        algorithm={"preset": "grpo", **advantage, "kl_coef": 0.0},
        optimizer={
            "learning_rate": task.RATE,
            "schedule": "constant",
            "beta2": task.BETA2,
            "weight_decay": 0.0,
            "max_grad_norm": task.CLIP_NORM,
        },
        training={"prompts_per_batch": task.PROMPTS, "max_steps": given.steps, "save_every": 0},
        report_to=[],
    )


if __name__ == "__main__":
    given = task.assignment()
    stopwatch, (first, *others) = task.Stopwatch(given), [f"reward/{one.__name__}/mean" for one in given.functions]

    def watch(event: IterationEvent) -> None:
        stopwatch.step(event.metrics[first], **{name.split("/")[1]: event.metrics[name] for name in others})

    run(config_of(given), rewards=given.functions, on_iteration=watch)
    stopwatch.write(("grpo_jax", "jax", "jaxlib", "flax", "optax"))
