"""The benchmark of absent devices: which of them a collective joins, in every form that XLA prints."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "targets"))

from launches import Array, Collective, Sizes, moved_bytes, parse_program, read_program, steps
from replica_groups import replica_groups

ROWS, COLUMNS = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]
HALVES, PAIRS = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]]
DISTANT = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}", ROWS),
        ("channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true", ROWS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, dimensions={0}", ROWS),
        ("replica_groups=mesh[data=4,model=2] {model}", ROWS),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", COLUMNS),
        ("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", COLUMNS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b','c'}, dimensions={1}", HALVES),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", HALVES),
        ("replica_groups=mesh['a'=8] {'a':(2)2,'a':(4)2}", HALVES),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", DISTANT),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", DISTANT),
        # An all-to-all of one program, by the XLA of jax 0.10 and by that of jax 0.12.
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_1':(2)2}", PAIRS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}", PAIRS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", [[*range(8)]]),
        ("source_target_pairs={{0,4},{1,5},{2,6},{3,7}}", DISTANT),
        ("replica_groups={}, to_apply=%add", [[*range(8)]]),
        ("to_apply=%add", [[*range(8)]]),
    ],
)
def test_the_groups_of_a_collective_are_read_in_every_form(text, groups):
    assert sorted(map(sorted, replica_groups(text, 8))) == groups


def test_a_form_that_nobody_knows_is_not_taken_for_all_devices():
    with pytest.raises(ValueError, match="unknown form"):
        replica_groups("replica_groups=spiral(8), dimensions={0}", 8)


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
