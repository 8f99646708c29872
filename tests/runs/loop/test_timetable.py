"""The formula of an iteration's time (docs/scaling.md) is what the real pipeline does, on a clock that jumps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipelines.virtual_time import ends_of_iterations

WORK = st.lists(st.integers(1, 9), min_size=1, max_size=4)
UPDATE = st.integers(1, 40)
LAG = st.sampled_from([0, 1])


def seconds_of(work, update, sizes, lag, follows=True):
    """`work` seconds for a prompt by stage; `sizes` prompts of each chunk."""
    stages = [seconds * sum(sizes) for seconds in work]
    share = max(sizes) / sum(sizes)
    batch = share * sum(stages) + (1 - share) * max(stages)
    if not lag:
        return batch + update
    return max(*stages, update, (batch + update) / 2 if follows else batch)


def pipeline_takes(work, update, sizes, lag, follows=True):
    with pytest.MonkeyPatch.context() as patch:
        ends = ends_of_iterations(work, update, sizes, lag=lag, follows=follows, iterations=16, monkeypatch=patch)
    return (ends[-1] - ends[-9]) / 8  # behind the first iterations, over whole rounds of two


@settings(max_examples=20)
@given(work=WORK, update=UPDATE, chunks=st.integers(1, 5), lag=LAG, follows=st.booleans())
def test_chunks_alike_take_what_the_formula_says(work, update, chunks, lag, follows):
    sizes = [1] * chunks
    taken = pipeline_takes(work, update, sizes, lag, follows)
    assert seconds_of(work, update, sizes, lag, follows) == pytest.approx(taken)


@settings(max_examples=10)
@given(work=WORK, update=UPDATE, chunks=st.integers(1, 3), last=st.integers(1, 3), lag=LAG)
def test_a_smaller_last_chunk_takes_no_longer(work, update, chunks, last, lag):
    sizes = [4] * chunks + [last]
    bound = seconds_of(work, update, sizes, lag)
    taken = pipeline_takes(work, update, sizes, lag)
    assert taken <= bound + 1e-6 and bound - taken <= (4 - last) * sum(work)
