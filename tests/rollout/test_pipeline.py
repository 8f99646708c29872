"""The pipeline: same results as a loop, real overlap, no way to hang. Events instead of timed assertions."""

import contextvars
import gc
import signal
import threading
import time
from functools import partial

import pytest

from grpo_jax.errors import Stopped
from grpo_jax.rollout.pipeline import Pipeline, Stage, StageError, StageTimeout, at_work, run_pipeline

PATIENCE = 600.0  # seconds after which a test that should have gone on fails instead of hanging


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} is still running"


def identity(x):
    return x


@pytest.mark.parametrize("count", [0, 1, 17])
def test_results_equal_a_plain_loop_in_order(count):
    seen = []
    stages = [
        Stage("double", lambda x: 2 * x),
        Stage("add", lambda x: seen.append(x) or x + 1),
        Stage("text", str, timed=False),
    ]
    results, seconds = run_pipeline(range(count), stages)
    assert results == [str(2 * i + 1) for i in range(count)] and seen == [2 * i for i in range(count)]
    assert list(seconds) == ["double", "add", "text"] and min(seconds.values()) >= 0
    _, seconds = run_pipeline([0, 1], [Stage("slow", lambda c: time.sleep(0.1) or c), Stage("waits", identity)])
    assert seconds["slow"] >= 0.2 > 2 * seconds["waits"]  # it waited as long


def test_stages_work_at_the_same_time_on_different_chunks():
    """All three calls must be inside their function at once, or the barrier breaks."""
    barrier = threading.Barrier(3, timeout=PATIENCE)

    def meet(name, chunk_at_meeting):
        return Stage(name, lambda chunk: (chunk == chunk_at_meeting and barrier.wait(), chunk)[1])

    results, _ = run_pipeline(range(4), [meet("sample", 2), meet("render", 1), meet("score", 0)])
    assert results == [0, 1, 2, 3]


def test_a_fast_stage_waits_for_a_slow_one():
    # Chunk 0 is in the slow stage, 1 waits in the queue, 2 is done and finds it full: 3 must not begin.
    begun, release, third = [], threading.Event(), threading.Event()

    def fast(chunk):
        begun.append(chunk)
        if chunk == 2:
            third.set()
        return chunk

    def slow(chunk):
        assert third.wait(PATIENCE)
        if chunk == 0:
            time.sleep(0.05)  # gives a wrong implementation the time to run ahead; a right one needs none
            assert begun == [0, 1, 2]
            release.set()
        return chunk

    results, _ = run_pipeline(range(8), [Stage("fast", fast), Stage("slow", slow)])
    assert release.is_set() and results == list(range(8))


def test_no_more_chunks_than_allowed_are_on_their_way():
    """From the first stage's call to the last one's result, however many stages and queues lie between."""
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

    stages = [Stage("begin", begin), *(Stage(f"s{i}", identity) for i in range(4)), Stage("end", end)]
    assert run_pipeline(range(9), stages, in_flight=2)[0] == list(range(9))
    assert max(most) == 2
    most.clear()
    run_pipeline(range(9), stages)
    assert max(most) > 2


@pytest.mark.parametrize("failing", ["first", "second", "third"])
def test_a_stage_that_raises_stops_all_and_is_named(failing):
    begun = []

    def call(name, chunk):
        begun.append((name, chunk))
        if name == failing and chunk == 1:
            raise KeyError("no such picture")
        return chunk

    with pytest.raises(StageError, match=rf"'{failing}'.*chunk 1.*KeyError.*no such picture") as caught:
        run_pipeline(range(1000), [Stage(name, partial(call, name)) for name in ("first", "second", "third")])
    assert (caught.value.stage, caught.value.chunk) == (failing, 1)
    assert isinstance(caught.value.__cause__, KeyError) and not isinstance(caught.value, StageTimeout)
    assert len(begun) < 30
    assert not [thread for thread in threading.enumerate() if thread.name in ("first", "second", "third")]


def test_a_failure_lets_running_calls_end_and_begins_no_other():
    inside, raised, begun = threading.Event(), threading.Event(), []

    def sample(chunk):
        begun.append(chunk)
        if chunk == 1:
            inside.set()
            assert raised.wait(PATIENCE)
            time.sleep(0.2)
            begun.append("ended")
        return chunk

    def score(chunk):
        assert inside.wait(PATIENCE)
        raised.set()
        raise RuntimeError("broken")

    with pytest.raises(StageError, match="broken"):
        run_pipeline(range(5), [Stage("sample", sample), Stage("score", score)])
    assert begun == [0, 1, "ended"]


def test_a_stage_that_never_returns_is_given_up():
    release = threading.Event()
    stuck = Stage("stuck", lambda chunk: (chunk == 1 and release.wait(PATIENCE), chunk)[1])
    try:
        with pytest.raises(StageTimeout, match=r"'stuck'.*chunk 1.*0\.2 s") as caught:
            run_pipeline(range(50), [Stage("quick", identity), stuck, Stage("last", identity)], timeout=0.2)
        assert not release.is_set() and caught.value.stage == "stuck"
        assert not [thread for thread in threading.enumerate() if thread.name in ("quick", "last")]
    finally:
        release.set()


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_caller(number):
    main = threading.main_thread().ident
    begun = []

    def handler(received, frame):
        raise Interrupted(received)

    def stage(chunk):
        begun.append(chunk)
        if chunk == 2:
            signal.pthread_kill(main, number)
        return chunk

    gc.collect()
    gc.disable()  # Python drops what a handler raises inside a collected object's callback
    previous = signal.signal(number, handler)
    try:
        with pytest.raises(Interrupted):
            # A million chunks: without the signal's exception this would go on for a long while.
            run_pipeline(range(10**6), [Stage("stage", stage), Stage("next", identity)])
    finally:
        signal.signal(number, previous)
        gc.enable()
    assert len(begun) < 10**6


def test_a_failing_stage_says_who_was_at_work():
    release = threading.Event()

    def work(waits):
        at_work("reward mine")
        assert not waits or release.wait(PATIENCE)
        raise ValueError("a\nb" * 10**5)

    with pytest.raises(StageTimeout, match=r"'score' failed on chunk 0: reward mine: no result after 0\.1 s"):
        run_pipeline([True], [Stage("score", work)], timeout=0.1)
    release.set()
    with pytest.raises(StageError, match="stage 'score' failed on chunk 0: reward mine: ValueError: a ba b") as failed:
        run_pipeline([False], [Stage("score", work)])
    assert len(str(failed.value)) < 300


def test_a_slow_judge_does_not_hold_up_the_next_batch():
    """All of it is sampled while the first picture of the one before is still looked at; each stage keeps the order."""
    line, sampled, order = Pipeline(), threading.Event(), []

    def stages(batch):
        def sample(chunk):
            order.append(("sample", batch, chunk))
            if (batch, chunk) == (1, 4):
                sampled.set()
            return chunk

        def score(chunk):
            if (batch, chunk) == (0, 0):
                assert sampled.wait(PATIENCE)
            order.append(("score", batch, chunk))
            return (batch, chunk)

        return [Stage("sample", sample, unbounded=True), Stage("score", score)]

    results = {}

    def draw(batch, slot):
        results[batch] = run_pipeline(range(5), stages(batch), slot=slot)[0]

    threads = [threading.Thread(target=draw, args=(batch, line.slot())) for batch in range(2)]
    for thread in reversed(threads):  # the slot decides, not who comes first
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    whole = [(batch, chunk) for batch in range(2) for chunk in range(5)]
    assert results == {0: whole[:5], 1: whole[5:]}
    assert [call[1:] for call in order if call[0] == "sample"] == whole
    assert [call[1:] for call in order if call[0] == "score"] == whole


def test_a_batch_behind_one_that_failed_never_begins():
    line, begun = Pipeline(), []
    slots = [line.slot(), line.slot()]

    def fail(chunk):
        raise ValueError("broken")

    with pytest.raises(StageError, match="broken"):
        run_pipeline([0], [Stage("score", fail)], slot=slots[0])
    with pytest.raises(Stopped):
        run_pipeline([0], [Stage("score", begun.append)], slot=slots[1], stopping=lambda: True)
    assert not begun


def test_stages_have_the_callers_context():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert run_pipeline([1, 2], [Stage("a", lambda x: x + variable.get())])[0] == [8, 9]
