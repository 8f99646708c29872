"""The plan of a run's programs against the GPU: the peak within a tenth, the bound below the time.

The plan is compiled as `--plan --target` does it, without timing kernels; the programs run as a run compiles them. The
card's peak never falls within a process, so the smaller program is first.
"""

from __future__ import annotations

import functools
import time

import iteration_work
import jax
import jax.numpy as jnp
import shapes
import timing
from outcome import Figures, Measurements, Skip

from grpo_jax.config.run import Config, make_config
from grpo_jax.planning.programs import Program, report_program, run_programs
from grpo_jax.planning.targets import TARGETS, Target

ALLOWED = 0.1
"""Of the planned peak."""
ROUNDS = 3


def measurements(tiny: bool) -> Measurements:
    """Sampling and the update of a 0.5 B, all weights."""
    lengths = dict(prompt_tokens=8, new_tokens=6) if tiny else dict(prompt_tokens=128, new_tokens=128)
    case = shapes.case("0.5B", tiny, prompts=2 if tiny else 4, group=4 if tiny else 8, **lengths)
    return {name: functools.partial(compare, name, case) for name in ("sample", "update")}


def target_here() -> Target | None:
    """The first device as a target; None where it is none, or the CPU."""
    words = jax.devices()[0].device_kind.lower().replace(" ", "")
    return next((Target(name) for name in sorted(TARGETS, key=len, reverse=True) if name in words), None)


def compare(name: str, case: iteration_work.Case) -> Figures:
    """The planned peak and bound of a program, and the card's."""
    config, model = configured(case), iteration_work.decoder_config(case)
    target, device = target_here(), jax.devices()[0]
    program = run_programs(config, model, None, None, target.platform if target else device.platform)[name]
    before = timing.card_bytes("peak_bytes_in_use")
    seconds = min(run_once(program) for _ in range(ROUNDS))
    after = timing.card_bytes("peak_bytes_in_use")
    if target is None or before is None or after is None:
        return {"seconds": seconds, "planned": "for GPUs and TPUs alone"}
    if after == before:
        raise Skip("a larger program ran before it in this process, and its peak hides this one's")
    planned = report_program(program, target, device)
    bound = planned.bound_seconds(target)
    difference = abs(after / planned.peak_bytes - 1)
    return {
        "planned_peak_gib": timing.gib(planned.peak_bytes),
        "peak_gib": timing.gib(after),
        "difference": difference,
        "allowed": ALLOWED,
        "seconds": seconds,
        "bound_seconds": bound,
        "agrees": difference <= ALLOWED and bound <= seconds,
    }


def configured(case: iteration_work.Case) -> Config:
    """The case as a run on texts."""
    return make_config(
        task="text",
        policy={"path": "policy", "compute_dtype": "bfloat16"},
        data={"max_prompt_tokens": case.prompt_tokens},
        sampling={"group_size": case.group, "max_new_tokens": case.new_tokens},
        training={"prompts_per_batch": case.prompts},
    )


def run_once(program: Program) -> float:
    """Seconds of one call; its arguments, of which some are donated, are zeros and true."""
    arguments = jax.tree.map(
        lambda leaf: jnp.full(leaf.shape, leaf.dtype == bool, leaf.dtype), program.arguments, is_leaf=_is_shape
    )
    jax.block_until_ready(arguments)
    start = time.perf_counter()
    jax.block_until_ready(program.function(*arguments))
    return time.perf_counter() - start


def _is_shape(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
