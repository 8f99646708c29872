"""The iteration benchmark: what its tables say, that its worker iterates, and that the floor counts what XLA counts."""

import json
import math
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


def test_prompts_have_the_length_asked_for_and_differ():
    first, again, other = (work.prompt_texts(TINY, i) for i in (0, 0, 1))
    assert first == again != other
    assert [len(text.split()) for text in first] == [TINY.prompt_tokens] * TINY.prompts
    assert set(" ".join(first).split()) <= set(work.words(TINY))


def test_the_reward_is_the_share_of_low_tokens():
    low, high = TINY.vocabulary // 2 - 1, TINY.vocabulary // 2
    assert work.reward(TINY, " ".join([f"t{low}"] * 2 + [f"t{high}"] * 6)) == 0.25


def test_a_worker_reads_what_the_driver_writes():
    given = work.Assignment(TINY, Path("/a folder"), 3, 2, "plain", "cpu", Path("out.json"))
    assert work.assignment(work.command_line(given)) == given


def test_the_update_is_what_the_other_phases_leave(tmp_path):
    given = work.Assignment(TINY, tmp_path, 1, 1, "", "wall", tmp_path / "out.json")
    work.write_report(given, [{"sampling": 1.0, "logprobs": 2.0, "total": 7.0}], ("jax", "no-such-package"))
    written = json.loads(given.out.read_text())
    assert written["iterations"][0]["update"] == 4.0
    assert written["versions"] == {"jax": jax.__version__}
    assert written["peak_mib"] > 10
    with pytest.raises(RuntimeError, match="expected 1 iterations, timed 0"):
        work.write_report(given, [], ())


def test_the_first_iteration_is_no_part_of_the_medians():
    slow, runs = row(100, 100, 100), [row(1, 2, 3), row(2, 2, 2), row(3, 9, 9)]
    told = grpo_iteration.summary([report(slow, *runs[:2], peak=10), report(slow, runs[2], peak=30)])
    assert [told[name] for name in (*work.PHASES, "total", "first", "peak_mib")] == [2, 2, 3, 6, 300, 20]
    assert told["iterations"] == 3
    assert told["spread"] == [6, 21]


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


def test_a_ratio_of_times_is_of_one_round_and_its_spread_is_told():
    """The machine was twice as slow in the second round, and the peer failed in the third."""
    first, slow = row(0, 0, 0), row(9, 9, 9)
    runs = {
        "ours": [report(slow, row(1, 1, 0), peak=10), report(slow, row(2, 2, 0)), report(slow, row(3, 3, 0))],
        "ours/layer": [report(slow, row(9, 9, 9), peak=10)],  # slower: it took part in one round
        "trl/plain": [report(first, row(2, 2, 1)), report(first, row(4, 2, 2)), {"error": "killed"}],
    }
    ratios = grpo_iteration.ratios(runs)
    assert ratios["time/trl"] == [2 / 5, 4 / 8] and ratios["memory/trl"] == [0.1]
    assert grpo_iteration.told(ratios["time/trl"]) == "0.45 (0.40 to 0.50)"


def test_where_lengths_differ_ratios_are_of_a_tokens_time():
    runs = {
        "ours": [report(row(0, 0, 0), row(1, 1, 0, tokens=50), row(2, 1, 1, tokens=100))],
        "trl/plain": [report(row(0, 0, 0), row(2, 2, 1, tokens=100))],
    }
    assert grpo_iteration.ratios(runs, by_token=True)["time/trl"] == pytest.approx([6 / 150 / (5 / 100)])


def test_each_token_may_be_the_last_with_the_probability_asked_for():
    torch = pytest.importorskip("torch")
    case = work.CASES["tiny-unequal"]
    torch.manual_seed(0)
    model = grpo_iteration.make_model(case)
    with torch.no_grad():
        logits = model(torch.randint(case.vocabulary, (16, 20))).logits
    assert float(logits.softmax(-1)[..., case.end].mean()) == pytest.approx(1 / case.ends, rel=0.2)


def test_a_worker_that_fails_is_reported(tmp_path):
    given = work.Assignment(TINY, tmp_path / "no such folder", 1, 1, "", "wall", tmp_path / "out.json")
    failed = grpo_iteration.run_worker("trl", given, "/bin/false")
    assert failed["error"].startswith("exit status 1")


def test_command_line_and_cases():
    chosen = grpo_iteration.options(["--cases", "small", "group", "--libraries", "ours"])
    assert chosen.cases == ["small", *(f"group-{group}" for group in work.GROUPS)]
    assert grpo_iteration.plan("group-4", [1, 2])[2] == [2]
    with pytest.raises(SystemExit, match="got 'large'"):
        grpo_iteration.expand("large")
    with pytest.raises(SystemExit):  # Tunix without its environment
        grpo_iteration.options([])
    with pytest.raises(SystemExit):  # its worker ends nothing early
        grpo_iteration.options(["--cases", "unequal", "--tunix_python", "python"])


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


def test_decoding_costs_what_scoring_the_same_tokens_costs():
    for case in (TINY, work.CASES["small"]):
        assert floor.sampling_work(case).flops == pytest.approx(floor.forward_work(case).flops)
        without_group = work.Case(**{**vars(case), "prompts": case.prompts * case.group, "group": 1})
        assert floor.sampling_work(case).bytes < floor.sampling_work(without_group).bytes


def test_the_share_is_the_larger_floor_over_the_time():
    ceilings = {"flops_per_second": 1e9, "bytes_per_second": 1e9}
    case = work.CASES["small"]
    told = floor.shares(case, dict.fromkeys(work.PHASES, 100.0), ceilings)
    for phase, figures in told.items():
        assert figures["floor_seconds"] == max(figures["gflop"], figures["gb"])
        assert math.isclose(figures["share"], figures["floor_seconds"] / 100), phase
