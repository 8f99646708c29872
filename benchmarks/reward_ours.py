"""A run of grpo_jax by `grpo_jax.run`; a worker of time_to_reward.py and reasoning_gym_tasks.py.

Variants: values of `policy.remat`.
"""

from __future__ import annotations

import reward_work as task

from grpo_jax import make_config, run
from grpo_jax.config.run import Config


def config_of(given: task.Assignment) -> Config:
    """The run's config; its AdamW has task.BETA1 always."""
    lora = {"rank": task.RANK, "alpha": task.ALPHA, "targets": list(task.TARGETS)}
    return make_config(
        task="text",
        run_dir=str(given.out.with_suffix(".run")),
        seed=given.seed,
        policy={"path": str(given.folder), "lora": lora, "remat": given.variant},
        data={"prompts": str(given.rows), "held_out": 0.0},
        sampling={"group_size": task.GROUP, "max_new_tokens": given.new_tokens, "temperature": given.temperature},
        algorithm={"preset": "grpo", "advantage": "grpo", "scale": "group", "kl_coef": 0.0},
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
    stopwatch, metric = task.Stopwatch(given), f"reward/{given.function.__name__}/mean"
    run(
        config_of(given),
        rewards=[given.function],
        on_iteration=lambda event: stopwatch.step(event.metrics[metric]),
    )
    stopwatch.write(("grpo_jax", "jax", "jaxlib", "flax", "optax"))
