"""The pipeline of chunks: the results of a loop, real overlap, no hangs. Events instead of timed assertions."""

import threading
import time
from collections import defaultdict

import pytest

from grpo_jax.errors import StageError, StageTimeout, Stopped
from grpo_jax.rollout.pipeline import Work, set_current_judge

PATIENCE = 600.0  # seconds after which a test that should have gone on fails instead of hanging


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} is still running"


def run(count, *stages, **options):
    """Send chunks through (name, function) stages; each function takes the chunk's number and the last result."""
    work = Work(**options)

    def chunk(number):
        value = number
        for name, function in stages:
            with work.stage(name, number):
                value = function(value)
        return value

    return work.run(count, chunk), work.seconds


@pytest.mark.parametrize("count", [0, 1, 17])
def test_results_equal_a_plain_loop_in_order(count):
    seen = []
    stages = ("double", lambda x: 2 * x), ("add", lambda x: seen.append(x) or x + 1), ("text", str)
    results, seconds = run(count, *stages)
    assert results == [str(2 * i + 1) for i in range(count)] and seen == [2 * i for i in range(count)]
    assert [*seconds] == (["double", "add", "text"] if count else []) and min(seconds.values(), default=0) >= 0


def test_one_chunk_is_sampled_while_the_one_before_is_judged():
    barrier = threading.Barrier(2, timeout=PATIENCE)
    meets = [("sample", lambda x: (x == 1 and barrier.wait(), x)[1]), ("score", lambda x: (x or barrier.wait(), x)[1])]
    assert run(4, *meets)[0] == [0, 1, 2, 3]


def test_at_most_two_chunks_are_in_progress():
    lock, running, most = threading.Lock(), set(), []

    def begin(chunk):
        with lock:
            running.add(chunk)
            most.append(len(running))
        return chunk

    def end(chunk):
        time.sleep(0.01)
        with lock:
            running.discard(chunk)
        return chunk

    assert run(9, ("sample", begin), ("render", int), ("score", end))[0] == [*range(9)]
    assert max(most) == 2


@pytest.mark.parametrize("failing", ["sample", "render", "score"])
def test_a_stage_that_raises_stops_all_and_is_named(failing):
    begun = []

    def call(name):
        def function(chunk):
            begun.append((name, chunk))
            if name == failing and chunk == 1:
                raise KeyError("no such picture")
            return chunk

        return name, function

    with pytest.raises(StageError, match=rf"'{failing}'.*chunk 1.*KeyError.*no such picture") as caught:
        run(1000, *map(call, ("sample", "render", "score")))
    assert (caught.value.stage, caught.value.chunk) == (failing, 1)
    assert isinstance(caught.value.__cause__, KeyError) and not isinstance(caught.value, StageTimeout)
    assert len(begun) < 30 and not [thread for thread in threading.enumerate() if thread.name == "rollout"]


def test_a_stage_that_never_returns_is_abandoned_and_names_its_judge():
    release = threading.Event()

    def stuck(chunk):
        set_current_judge("reward mine")
        assert chunk != 1 or release.wait(PATIENCE)
        return chunk

    try:
        with pytest.raises(StageTimeout, match=r"'score' failed on chunk 1: reward mine: no result after 0\.2 s"):
            run(50, ("sample", int), ("score", stuck), timeout=0.2)
        assert [thread.name for thread in threading.enumerate() if "rollout" in thread.name] == ["abandoned rollout"]
    finally:
        release.set()

    def raises(chunk):
        set_current_judge("reward mine")
        raise ValueError("a\nb" * 10**5)

    with pytest.raises(StageError, match="stage 'score' failed on chunk 0: reward mine: ValueError: a ba b") as failed:
        run(1, ("score", raises))
    assert len(str(failed.value)) < 300


def test_no_stage_begins_after_a_stop():
    begun, stop = [], threading.Event()

    def sample(chunk):
        begun.append(chunk)
        stop.set()
        time.sleep(0.7)  # the caller looks twice a second
        return chunk

    with pytest.raises(Stopped):
        run(1000, ("sample", sample), stopping=stop.is_set)
    assert len(begun) < 5


def test_a_slow_judge_does_not_hold_up_the_next_batch():
    """It is sampled while the one before is still judged; no stage works for both at once."""
    locks, sampled, busy = defaultdict(threading.Lock), threading.Event(), defaultdict(int)

    def alone(name, function):
        def call(chunk):
            busy[name] += 1
            assert busy[name] == 1
            function(chunk)
            busy[name] -= 1
            return chunk

        return name, call

    results = {}

    def draw(batch, score):
        sample = sampled.set if batch else lambda: None
        stages = alone("sample", lambda chunk: sample()), alone("score", score)
        results[batch] = run(3, *stages, locks=locks)[0]

    first = threading.Thread(target=draw, args=(0, lambda chunk: chunk or sampled.wait(PATIENCE)))
    second = threading.Thread(target=draw, args=(1, lambda chunk: None))
    first.start()
    second.start()
    first.join(PATIENCE)
    second.join(PATIENCE)
    assert results == {0: [0, 1, 2], 1: [0, 1, 2]}
