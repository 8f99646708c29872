"""The formula of an iteration's time is what the real pipeline does, on a clock that jumps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipelines.virtual_time import ends_of_iterations

from grpo_jax.planning.stages import Stages, batch_seconds, iteration_seconds, slowest

NAMES = ("sample", "render", "score", "more")
WORK = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def stages(work, update, sizes, **others):
    whole = sum(sizes)
    seconds = {name: float(unit * whole) for name, unit in zip(NAMES, work, strict=False)}
    return Stages(seconds, float(update), max(sizes) / whole, **others)


def steady(ends):
    """Mean time of an iteration behind the first ones, over whole rounds of two."""
    return (ends[-1] - ends[-9]) / 8


def pipeline_takes(work, update, sizes, lag, follows, monkeypatch):
    return steady(
        ends_of_iterations(work, update, sizes, lag=lag, follows=follows, iterations=16, monkeypatch=monkeypatch)
    )


@settings(max_examples=20)
@given(
    work=WORK, update=st.integers(1, 40), chunks=st.integers(1, 5), lag=st.sampled_from([0, 1]), follows=st.booleans()
)
def test_chunks_alike_take_what_the_pipeline_takes(work, update, chunks, lag, follows):
    with pytest.MonkeyPatch.context() as patch:
        taken = pipeline_takes(work, update, [1] * chunks, lag, follows, patch)
    assert iteration_seconds(stages(work, update, [1] * chunks, lag=lag, follows=follows)) == pytest.approx(taken)


@settings(max_examples=10)
@given(
    work=WORK, update=st.integers(1, 40), chunks=st.integers(1, 3), last=st.integers(1, 3), lag=st.sampled_from([0, 1])
)
def test_a_smaller_last_chunk_takes_no_longer_than_is_said(work, update, chunks, last, lag):
    sizes = [4] * chunks + [last]
    with pytest.MonkeyPatch.context() as patch:
        taken = pipeline_takes(work, update, sizes, lag, True, patch)
    said = iteration_seconds(stages(work, update, sizes, lag=lag))
    assert taken <= said + 1e-6 and said - taken <= (4 - last) * sum(work)


def test_figures_of_the_benchmark():
    """What benchmarks/scaling/lag.py calls the waiting alone."""
    for lag, chunks, seconds in ((0, 1, 3), (0, 8, 2.125), (1, 1, 1.5), (1, 8, 1.0625)):
        assert iteration_seconds(Stages({"sample": 1, "score": 1}, 1, 1 / chunks, lag)) == seconds


def test_stages_with_one_card_take_turns():
    alone = Stages({"sample": 4.0, "render": 6.0, "score": 2.0}, 5.0, 0.25, lag=1)
    assert iteration_seconds(alone) == pytest.approx((0.25 * 12 + 0.75 * 6 + 5) / 2)
    assert iteration_seconds(alone._replace(in_turns=(frozenset({"sample", "update"}),))) == 9
    judges = alone._replace(lag=0, in_turns=(frozenset({"render", "score"}),))
    assert batch_seconds(judges) == pytest.approx(0.25 * 12 + 0.75 * 8)


def test_few_chunks_on_their_way_hold_up_short_stages():
    four = Stages({"sample": 4.0, "render": 4.0, "score": 4.0, "respond": 4.0}, 0.0, 1 / 100)
    assert batch_seconds(four) == pytest.approx(4, rel=0.1)
    assert batch_seconds(four._replace(in_flight=2)) == pytest.approx(8, rel=0.1)


def test_the_slowest_stage_is_named():
    assert slowest(Stages({"sample": 1.0, "score": 3.0}, 2.0)) == "score"
    assert slowest(Stages({"sample": 1.0, "score": 3.0}, 4.0)) == "update"
    card = Stages({"sample": 2.0, "score": 3.0}, 2.0, in_turns=(frozenset({"sample", "update"}),))
    assert (slowest(card), slowest(card._replace(lag=1))) == ("score", "sample and update")
