"""--plan --target: devices that are not here, what their compiler's programs are read to do, words and exit codes."""

import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import pytest
from support.tiny_decoders import QWEN2_FIELDS

from grpo_jax.config import make_config
from grpo_jax.errors import UserError
from grpo_jax.planning import cards, targets
from grpo_jax.planning.hlo import Array, Collective, Reading, Sizes, moved_bytes, parse_program, read_program, steps
from grpo_jax.planning.target_plan import Report
from grpo_jax.planning.targets import Target, parse_target
from grpo_jax.train import main
from grpo_jax.training.memory import GIB

CUDA = any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin")))
TPU = importlib.util.find_spec("libtpu") is not None


@pytest.mark.parametrize(
    ("text", "target", "count"),
    [
        ("h100", Target("h100", 1, 1), 1),
        ("a6000:4", Target("a6000", 1, 4), 4),
        ("h100:2x8", Target("h100", 2, 8), 16),
        ("v5e:8", Target("v5e", 1, 8), 8),
    ],
)
def test_targets_are_spelled_as_they_are_read(text, target, count):
    assert parse_target(text) == target and str(target) == text and target.count == count


@pytest.mark.parametrize("text", ["", "h101", "H100", "h100:", "h100:0", "h100:2x", "h100:2x8x1"])
def test_what_is_no_target_is_one_line(text):
    with pytest.raises(UserError, match=r"--target: expected one of h100, .*, got "):
        parse_target(text)


PLAN = ["--config=prompt_enhancement_miniature", "--plan"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=prompt_enhancement_miniature", "--target=h100"], "--target: it says what --plan is to plan for"),
        ([*PLAN, "--target"], "--target: expected a device, such as h100 or h100:2x8, got nothing"),
        ([*PLAN, "--plan_json=plan.json"], "--plan_json: it is what the compiler of a device says; add --target"),
        ([*PLAN, "--target=h100", "--device_memory_gib=80"], "--device_memory_gib: expected nothing, --target has"),
        (
            [*PLAN, "--target=h100:2", "--policy.mesh.fsdp=4"],
            "policy.mesh: expected at most 2 devices for --target h10",
        ),
        (
            [*PLAN, "--target=h100:2x2", "--policy.mesh.fsdp=4", "--training.lag=1"],
            "training.lag: expected 0 with a policy over 2 processes, got 1",
        ),
        (
            [*PLAN, "--target=h100:3x3", "--policy.mesh.fsdp=8"],
            "policy.mesh: expected fsdp x tensor a multiple of the 3 processes, got 8",
        ),
        (
            [*PLAN, "--target=h100"],
            "--target h100: XLA's compiler for CUDA is not installed; run pip",
        ),
        (
            [*PLAN, "--target=v5e"],
            "--target v5e: XLA's compiler for TPU is not installed; run pip",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(("lag", "quantised", "fsdp"), [(0, "none", 8), (1, "none", 4), (0, "int8", None)])
def test_no_mesh_is_advised_that_a_run_refuses(lag, quantised, fsdp):
    """Several processes that of another lag than 0, any run that of quantised weights."""
    sections = {"training": {"lag": lag, "prompts_per_batch": 8, "minibatches": 1}}
    config = make_config({"task": "text", **sections, "policy": {"quantised": quantised, "lora": {"rank": 4}}})
    line = cards.Line("weights", 2 * GIB, "")
    devices = [cards.Card(f"gpu:{number}", GIB, {"policy": [line]}) for number in range(8)]
    devices.append(cards.Card("cpu", GIB, {}))
    assert cards.list_savings(config, devices, Target("h100", 2, 4)).get("policy.mesh.fsdp") == fsdp


def test_loops_count_as_often_as_they_turn():
    def layers(weights, x):
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    compiled = jax.jit(layers).lower(jnp.zeros((5, 64, 64)), jnp.zeros((8, 64))).compile()
    reading = read_program(compiled, Sizes(frozenset({64 * 64}), frozenset(), layers=5))
    assert reading.flops == 5 * 2 * 8 * 64 * 64
    assert reading.layer_kernels >= 1 and reading.kernels >= 5 * reading.layer_kernels
    stack = 5 * 4 * 64 * 64
    assert stack <= reading.bytes < 5 * stack  # of the stack only a turn's weight is read


def test_a_loop_of_unknown_length_writes_the_tokens():
    def decode(weight, x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: jnp.tanh(x @ weight), x)

    compiled = jax.jit(decode).lower(jnp.zeros((64, 64)), jnp.zeros((8, 64))).compile()
    sizes = Sizes(frozenset(), frozenset(), layers=1)
    once, often = (read_program(compiled, sizes._replace(turns=turns)).flops for turns in (0, 7))
    assert once == 2 * 8 * 64 * 64 and often == 7 * once


TEXT = """HloModule program

%moved (p: bf16[4,8,8], i: s32[]) -> bf16[8,8] {
  %p = bf16[4,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,8,8]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}
  ROOT %flat = bf16[8,8]{1,0} bitcast(%slice)
}

%body (t: (s32[], bf16[4,8,8], f32[2,8])) -> (s32[], bf16[4,8,8], f32[2,8]) {
  %t = (s32[], bf16[4,8,8]{2,1,0}, /*index=2*/f32[2,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %w = bf16[4,8,8]{2,1,0} get-tuple-element(%t), index=1
  %x = f32[2,8]{1,0} get-tuple-element(%t), index=2
  %copied = bf16[8,8]{1,0} fusion(%w, %n), kind=kLoop, calls=%moved, metadata={op_name="a(b)"}
  %product = (f32[2,8]{1,0}, s8[64]{0}) custom-call(%x, %copied), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %y = f32[2,8]{1,0} get-tuple-element(%product), index=0
  %begun = f32[2,8]{1,0} all-reduce-start(%y), to_apply=%add
  %sum = f32[2,8]{1,0} all-reduce-done(%begun)
  ROOT %next = (s32[], bf16[4,8,8]{2,1,0}, f32[2,8]{1,0}) tuple(%n, %w, %sum)
}

%condition (t.1: (s32[], bf16[4,8,8], f32[2,8])) -> pred[] {
  %t.1 = (s32[], bf16[4,8,8]{2,1,0}, f32[2,8]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: bf16[4,8,8], b: f32[2,8]) -> f32[2,8] {
  %a = bf16[4,8,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = f32[2,8]{1,0} parameter(1)
  %one = s32[] constant(0)
  %start = (s32[], bf16[4,8,8]{2,1,0}, f32[2,8]{1,0}) tuple(%one, %a, %b)
  %loop = (s32[], bf16[4,8,8]{2,1,0}, f32[2,8]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  ROOT %out = f32[2,8]{1,0} get-tuple-element(%loop), index=2
}
"""


class Compiled:
    def as_text(self):
        return TEXT


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("all-gather-start(%a)", 4 * 64),
        ("all-gather(%a, %b)", 4 * (64 + 16)),
    ],
)
def test_what_is_awaited_later_counts_its_results(line, size):
    text = f"ENTRY %main () -> f32[1] {{\n  %a = f32[16]{{0}} parameter(0)\n  ROOT %c = (f32[16], f32[64]) {line}\n}}\n"
    computations, _ = parse_program(text)
    assert moved_bytes(computations["main"]["c"]) == size


def test_copies_library_products_and_collectives_are_read_from_a_cards_program():
    computations, entry = parse_program(TEXT)
    assert computations["main"]["a"].arrays == (Array("bf16", (4, 8, 8)),)
    assert [(step.instruction.name, step.times) for step in steps(computations, entry)] == [
        *(("copied", 4), ("product", 4), ("begun", 4)),
    ]
    reading = read_program(Compiled(), Sizes(frozenset({64}), frozenset(), layers=4))
    assert reading.kernels == 12 and reading.layer_kernels == 3 and reading.weight_copies == 1
    assert reading.collectives == (Collective("all-reduce", 4 * 64, 4),)
    assert reading.flops == reading.library_flops == 4 * 2 * 2 * 8 * 8
    copied, product, reduced = 2 * 128, 64 + 128 + 64 + 64, 2 * 64  # of the stack only the slice is read
    assert reading.bytes == 4 * (copied + product + reduced) + 4 * 4  # and a place of four bytes


FLASH = """HloModule program

ENTRY %main (q: bf16[2,128,4,8]) -> bf16[2,128,4,8] {
  %q = bf16[2,128,4,8]{3,2,1,0} parameter(0)
  ROOT %out = bf16[2,128,4,8]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/KERNEL/pallas_call"}
}
"""


@pytest.mark.parametrize(("kernel", "products"), [("mha_forward", 2), ("mha_backward", 7), ("other", 0)])
def test_attentions_kernels_count_half_of_the_keys(kernel, products, monkeypatch):
    monkeypatch.setattr(Compiled, "as_text", lambda self: FLASH.replace("KERNEL", kernel))
    reading = read_program(Compiled(), Sizes(frozenset(), frozenset(), layers=1))
    assert reading.flops == reading.library_flops == products * 2 * 4 * 128 * 128 * 8


DECODING = """HloModule program

ENTRY %main (heads: bf16[2,4,1,9,64]) -> bf16[2,4,1,7,64] {
  %heads = bf16[2,4,1,9,64]{4,3,2,1,0} parameter(0)
  %keys = bf16[2,1,64,32]{3,2,1,0} parameter(1)
  %mask = pred[2,32]{1,0} parameter(2)
  %slot = s32[] parameter(3)
  %cache = bf16[2,1,4,64,128]{4,3,2,1,0} parameter(4)
  %out = (bf16[2,4,1,7,64], bf16[2,1,4,64,128], bf16[2,1,4,128,64]) \
custom-call(%heads, %keys, %keys, %mask, %slot, %cache, %cache), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/Decoder/layers_0/decode_attention/pallas_call"}
  ROOT %mixed = bf16[2,4,1,7,64]{4,3,2,1,0} get-tuple-element(%out), index=0
}
"""


def test_a_decoding_kernel_reads_the_prompt_and_half_of_the_cache(monkeypatch):
    monkeypatch.setattr(Compiled, "as_text", lambda self: DECODING)
    reading = read_program(Compiled(), Sizes(frozenset(), frozenset(), layers=1))
    assert reading.kernels == 1
    assert reading.flops == reading.library_flops == 2 * (2 * 4 * 7) * 2 * 64 * (32 + 128 / 2)
    prompt, own, tokens = 2 * 64 * 32 * 2, 2 * 4 * 64 * 128 * 2, 2 * 4 * (9 + 7) * 64 * 2
    assert reading.bytes == 2 * prompt + 2 * own / 2 + tokens + 2 * 32 + 4


NEEDED = {
    "h100": pytest.mark.skipif(not CUDA, reason="needs grpo_jax[targets]: no CUDA compiler is installed"),
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
    assert main([*words, "--data.max_prompt_tokens=16", f"--plan_json={tmp_path / 'plan.json'}"]) == 0
    printed = capsys.readouterr().out
    assert "compiled for" in printed and "not run" in printed and printed.endswith("It fits.\n")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["target"] == target and plan["programs"].keys() == {"sample", "logprobs", "update"}
    for program in plan["programs"].values():
        assert program["peak_bytes"] >= program["argument_bytes"] > 0 and program["bound_seconds"] > 0
        assert program["kernels"] > 0 and program["flops"] > 0
    assert plan["programs"]["sample"]["kernels_per_layer_and_token"] > 1


@pytest.mark.parametrize(("needed", "said"), [(7, "It would with --policy.remat layer."), (9, "enough alone.")])
def test_what_would_fit_alone_is_tried_in_order(needed, said, tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_FIELDS))
    reading = Reading(1, 1.0, 0, 0, (), 1.0, 1.0, 1.0)

    def compiled(config, *_):
        temporary = 100 * GIB if config.policy.remat != "layer" or needed > 8 else needed * GIB
        report = Report(GIB, temporary, 0, GIB + temporary, reading, 1.0)
        return {"sample": report, "update": report}

    monkeypatch.setattr(cards, "plan_programs", compiled)
    monkeypatch.setattr(cards, "open_devices", lambda target: [None])
    assert main([*PLAN, f"--policy.path={tmp_path}", "--target=h100", "--policy.remat=products"]) == 1
    assert said in capsys.readouterr().out
