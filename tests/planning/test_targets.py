"""--plan --target: absent devices, the work of programs, text and exit codes."""

import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import pytest
from support.tiny_decoders import QWEN2_FIELDS

from grpo_jax.errors import UserError
from grpo_jax.models.kernels import attend_token, causal_rows
from grpo_jax.planning import targets
from grpo_jax.planning.programs import Program, count_work
from grpo_jax.planning.targets import Target, nearest_gpu, parse_target
from grpo_jax.train import main

CUDA = any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin")))
TPU = importlib.util.find_spec("libtpu") is not None


@pytest.mark.parametrize(
    ("text", "target"), [("h100", Target("h100")), ("a6000:4", Target("a6000", 4)), ("v5e:8", Target("v5e", 8))]
)
def test_targets_are_spelled_as_they_are_read(text, target):
    assert parse_target(text) == target and str(target) == text


@pytest.mark.parametrize("text", ["", "h101", "H100", "h100:", "h100:0", "h100:2x8"])
def test_what_is_no_target_is_one_line(text):
    with pytest.raises(
        UserError, match=r"--target: expected one of h100, .*, or --device_memory_gib for another card, got "
    ):
        parse_target(text)


def test_cards_below_sm_80_have_no_triton_and_stand_for_no_other_card():
    assert [Target(name).platform for name in ("rtx4090", "l4", "t4", "v5e")] == ["cuda", "cuda", "gpu", "tpu"]
    assert nearest_gpu(24, 2) == Target("rtx4090", 2) and nearest_gpu(16, 1) == Target("l4")


PLAN = ["--config=prompt_enhancement_miniature", "--plan"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=prompt_enhancement_miniature", "--target=h100"], "--target: an option of --plan; add --plan"),
        ([*PLAN, "--target"], "--target: expected one argument"),
        ([*PLAN, "--target=h100", "--device_memory_gib=80"], "--device_memory_gib: not allowed with argument --target"),
        (
            [*PLAN, "--target=h100:2", "--policy.mesh.fsdp=4"],
            "policy.mesh: expected at most 2 devices for --target h10",
        ),
        ([*PLAN, "--target=h100"], "--target h100: needs jax_cuda12_plugin or jax_cuda13_plugin; run pip"),
        ([*PLAN, "--target=v5e"], "--target v5e: needs libtpu; run pip"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1 and not captured.out


def work_of(function, *arguments, turns=0):
    return count_work(Program(jax.jit(function), arguments, turns))


def test_loops_count_as_often_as_they_turn():
    def layers(weights, x):
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    work = work_of(layers, jnp.zeros((5, 64, 64)), jnp.zeros((8, 64)))
    assert work.flops == 5 * 2 * 8 * 64 * 64
    assert work.bytes == 5 * 4 * (64 * 64 + 2 * 8 * 64)  # each turn reads a weight and a state, and writes a state


def test_loops_of_unknown_length_write_the_tokens():
    """Of two loops over all rows each writes half; one over fewer rows does not turn."""

    def decode(weight, x):
        def loop(x):
            step = lambda carry: (jnp.tanh(carry[0] @ weight), ~carry[1])  # noqa: E731
            return jax.lax.while_loop(lambda carry: carry[1].any(), step, (x, jnp.ones(len(x), bool)))[0]

        return loop(loop(x)), loop(x[:4])

    once, often = (work_of(decode, jnp.zeros((64, 64)), jnp.zeros((8, 64)), turns=turns).flops for turns in (0, 7))
    assert once == 2 * 2 * 8 * 64 * 64 and often == 7 * once / 2


@pytest.mark.parametrize(("platform", "backward"), [("cuda", 7), ("tpu", 7), ("cudnn", 5)])
def test_attentions_kernels_count_half_of_the_keys(platform, backward, monkeypatch):
    """Forward two products of each query with half of the keys; backward more, by one kernel or two, beside them."""
    version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(version, lambda: 91000)  # of a library that only execution needs
    shapes = [jax.ShapeDtypeStruct((2, 256, 1, *more, 64), jnp.bfloat16) for more in ((4,), (), ())]
    mask = jax.ShapeDtypeStruct((2, 256), bool)

    def attend(query, key, value, mask):
        return causal_rows(query, key, value, mask, platform).astype(jnp.float32).sum()

    product = 2 * 256 * 4 * 64 * 256
    assert work_of(attend, *shapes, mask).flops == 2 * product
    assert work_of(jax.grad(attend, (0, 1, 2)), *shapes, mask).flops == (2 + backward) * product


def test_a_decoding_kernel_reads_the_prompt_and_half_of_the_cache():
    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    query, one, mask = shape(2, 4, 1, 7, 64), shape(2, 4, 1, 64), shape(2, 32, dtype=bool)
    prefix, cache = (shape(2, 1, 64, 32), shape(2, 1, 32, 64)), (shape(2, 1, 4, 64, 128), shape(2, 1, 4, 128, 64))
    work = work_of(attend_token, query, one, one, prefix, mask, cache, shape(dtype=jnp.int32))
    assert work.flops == 2 * (2 * 4 * 7) * 2 * 64 * (32 + 128 / 2)
    arguments = 2 * (2 * 4 * 7 * 64 + 2 * 2 * 4 * 64 + 2 * 2 * 64 * 32 + 2 * 2 * 4 * 64 * 128) + 2 * 32 + 4
    assert work.bytes == arguments


NEEDED = {
    "h100": pytest.mark.skipif(not CUDA, reason="needs grpo_jax[targets]: no CUDA compiler is installed"),
    "l4": pytest.mark.skipif(not CUDA, reason="needs grpo_jax[targets]: no CUDA compiler is installed"),
    "t4": pytest.mark.skipif(not CUDA, reason="needs grpo_jax[targets]: no CUDA compiler is installed"),
    "v5e": pytest.mark.skipif(not TPU, reason="needs grpo_jax[targets]: no TPU compiler is installed"),
}


@pytest.mark.targets
@pytest.mark.parametrize("target", [pytest.param(name, marks=mark) for name, mark in NEEDED.items()])
def test_a_run_is_planned_by_the_compiler_of_a_target(target, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # back afterwards: libtpu must not see it
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(QWEN2_FIELDS))
    small = ["--training.prompts_per_batch=4", "--sampling.group_size=3", "--sampling.max_new_tokens=6"]
    words = [*PLAN, *small, f"--policy.path={tmp_path / 'policy'}", f"--target={target}"]
    assert main([*words, "--data.max_prompt_tokens=16"]) == 0
    printed = capsys.readouterr().out
    assert "compiled for" in printed and "not run" in printed and printed.endswith("It fits.\n")
    rows = [line.split() for line in printed.splitlines() if line.endswith(" s")]
    assert [row[0] for row in rows] == ["sample", "logprobs", "update"]
    assert all(float(row[1]) <= float(row[3]) and float(row[4]) > 0 and float(row[6]) > 0 for row in rows)
