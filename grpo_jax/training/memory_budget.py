"""How many micro-batches an update needs so that its temporary memory stays within a stated budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from grpo_jax.config import Config
from grpo_jax.errors import UserError
from grpo_jax.runs.parts import Parts, Say

_GIB = 2**30


def within_budget(parts: Parts, say: Say) -> Parts:
    """The parts with training.accumulation as training.memory_budget_gib asks for; as they are where it is 0.

    The update is compiled for the longest prompts and completions there may be, and XLA tells its temporary memory:
    activations, gradients, logits of a chunk of tokens. Weights and optimizer state are not part of it.

    Raises:
        UserError: One prompt at a time does not fit.
    """
    from grpo_jax.planning.policy import update_bytes

    config, training = parts.config, parts.config.training
    if training.memory_budget_gib == 0:
        return parts
    length = parts.environment.encode([parts.prompts.train[0].prompt])[0].shape[1]
    data = dataclasses.replace(config.data, max_prompt_tokens=length)

    def with_accumulation(count: int) -> Config:
        return dataclasses.replace(config, training=dataclasses.replace(training, accumulation=count))

    prompts = training.prompts_per_batch // training.minibatches
    count, used = fewest_parts(
        lambda count: update_bytes(
            dataclasses.replace(with_accumulation(count), data=data), parts.loaded.config, parts.mesh
        ),
        prompts // config.policy.mesh.fsdp,
        budget=int(training.memory_budget_gib * _GIB),
        least=training.accumulation,
    )
    if used > training.memory_budget_gib * _GIB:
        raise UserError(
            f"training.memory_budget_gib = {training.memory_budget_gib:g}: an update takes {used / _GIB:.2f} GiB with "
            f"{prompts // count} of its prompts at a time, and no fewer are possible; choose policy.remat layer, or a "
            "smaller sampling.group_size or max_new_tokens"
        )
    say(
        "update",
        f"{count} micro-batches of {prompts // count} prompts: {used / _GIB:.2f} GiB beside the weights, of "
        f"{training.memory_budget_gib:g} allowed",
    )
    return parts._replace(config=with_accumulation(count))


def fewest_parts(measure: Callable[[int], int], rows: int, *, budget: int, least: int = 1) -> tuple[int, int]:
    """The smallest divisor of `rows`, `least` or more, whose measured bytes are within the budget, and those bytes.

    Where none is, the largest. A part's memory falls at most in proportion, so that divisors which cannot fit are
    passed over without being measured (each measurement compiles the update).
    """
    choices = [count for count in range(least, rows + 1) if rows % count == 0]
    while True:
        count, choices = choices[0], choices[1:]
        used = measure(count)
        if used <= budget or not choices:
            return count, used
        choices = [more for more in choices if used * count <= budget * more] or choices[-1:]
