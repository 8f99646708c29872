"""The iteration benchmark: what its tables say, that its worker iterates, and that the floor counts what XLA counts."""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import floor  # noqa: E402
import grpo_iteration  # noqa: E402
import iteration_work as work  # noqa: E402

from grpo_jax.core.logprobs import token_logprobs  # noqa: E402
from grpo_jax.models.decoder import init_variables  # noqa: E402
from grpo_jax.models.policy import make_policy  # noqa: E402

TINY = work.CASES["tiny"]


def row(sampling: float, logprobs: float, update: float, tokens: int = 100) -> dict:
    total = sampling + logprobs + update
    return {"sampling": sampling, "logprobs": logprobs, "update": update, "total": total, "tokens": tokens}


def report(*rows: dict, peak: float = 100.0) -> dict:
    return {"iterations": list(rows), "peak_mib": peak, "versions": {}}


def test_ratios_take_the_best_of_each_library_for_time_and_for_memory():
    runs = {
        "ours": [report(row(0, 0, 0), row(1, 1, 0), peak=100)],
        "ours/layer": [report(row(0, 0, 0), row(1, 1, 2), peak=50)],
        "trl/plain": [report(row(0, 0, 0), row(2, 2, 4), peak=400)],
        "trl/checkpointing": [report(row(0, 0, 0), row(2, 2, 6), peak=200)],
        "tunix": [{"error": "no such module"}],
    }
    rows = {name: grpo_iteration.summary(reports) for name, reports in runs.items()}
    ratios = grpo_iteration.ratios(runs)
    assert ratios == {"time/trl": [0.25], "memory/trl": [0.25]}
    assert grpo_iteration.slower_variants(runs, "trl") == {"trl/checkpointing"}
    assert grpo_iteration.slower_variants(runs, "ours") == {"ours/layer"}
    assert grpo_iteration.slower_variants(runs, "tunix") == set()

    lines = grpo_iteration.table([{"case": "tiny", "threads": 1, "libraries": rows, "ratios": ratios}]).splitlines()
    assert "| tiny | 1 | tunix | 1 process(es) failed | | | | | | |" in lines
    assert "| tiny | 1 | ours | 1.00 | 1.00 | 0.00 | 2.00 | 250.0 | 0.0 | 100 |" in lines
    assert lines[-1] == "| tiny | 1 | 0.25 | – | 0.25 | – |"


@pytest.mark.wide
@pytest.mark.filterwarnings("default")
def test_our_worker_iterates(tmp_path):
    folder = grpo_iteration.make_folder(TINY, tmp_path)
    cores = len(os.sched_getaffinity(0))
    given = work.Assignment(TINY, folder, 2, min(2, cores), "", "wall", tmp_path / "out.json")
    told = grpo_iteration.run_worker("ours", given, sys.executable)
    assert "error" not in told, told.get("error")
    assert len(told["iterations"]) == 2
    first, second = told["iterations"]
    assert all(value > 0 for value in second.values())
    assert second["total"] < first["total"]  # nothing compiles in the second


def flops(function, *arrays) -> float:
    """What XLA counts, before it optimises."""
    return jax.jit(function).lower(*arrays).cost_analysis()["flops"]


@pytest.mark.wide  # of a benchmark alone
def test_the_floor_counts_the_operations_xla_counts():
    # One layer, so that no loop hides work; wide next to its length, so that masked attention and norms weigh little.
    case = work.Case("counted", 2, 4, 6, 9, hidden=128, layers=1, heads=4, kv_heads=2, mlp=320, vocabulary=256)
    config = work.decoder_config(case)
    policy = make_policy(config, remat="none")
    variables = init_variables(config, jax.random.key(0))
    prompts = jnp.ones((case.prompts, case.prompt_tokens), jnp.int32)
    tokens = jnp.ones((case.prompts, case.group, case.new_tokens), jnp.int32)

    def loss(variables):
        hidden = policy.forward_group(variables, prompts, prompts > 0, tokens, tokens > 0)
        return token_logprobs(hidden, policy.head(variables), tokens, temperature=1.0)[0].sum()

    assert flops(loss, variables) == pytest.approx(floor.forward_work(case).flops, rel=0.2)
    update = floor.update_work(case).flops
    assert flops(jax.grad(loss), variables) == pytest.approx(update, rel=0.3)

    def prefill(variables):
        prefix = policy.prefill(variables, prompts, prompts > 0)
        return prefix, prefix.hidden @ policy.head(variables).T

    once = floor.sampling_work(work.Case(**{**vars(case), "new_tokens": 1}))
    assert flops(prefill, variables) == pytest.approx(once.flops, rel=0.1)
    assert floor.parameters(case) == pytest.approx(sum(x.size for x in jax.tree.leaves(variables)), rel=0.01)
