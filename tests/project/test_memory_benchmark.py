"""The memory benchmark's claim at a size that compiles at once; and what it writes."""

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("memory", Path(__file__).parents[2] / "benchmarks" / "memory.py")
memory = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(memory)

SMALL = dict(vocabulary=8192, width=16)


def test_chunks_take_a_fraction_of_all_logits_and_do_not_grow():
    chunked = {length: memory.temporary_bytes(length, 64, **SMALL) for length in (256, 1024)}
    assert chunked[1024] < memory.temporary_bytes(1024, None, **SMALL) / 8
    # 64 tokens' logits are 2 MiB; 768 tokens more may add their states, not logits.
    assert chunked[1024] - chunked[256] < 64 * 8192 * 4 / 4


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_head_has_no_product_of_its_shape(frozen):
    wide = dict(vocabulary=2048, width=512)
    head = 4 * 2048 * 512
    assert (memory.temporary_bytes(256, 64, **wide, frozen_head=frozen) > head) is not frozen
