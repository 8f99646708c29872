"""`async def` rewards run concurrently, and fail with the same messages as others."""

import asyncio
import threading

import numpy as np
import pytest

from grpo_jax.errors import StopRun
from grpo_jax.rollout.rewards import RewardError, collect_rewards
from grpo_jax.rollout.user_code import event_loop

PATIENCE = 60  # seconds; only a mistake takes that long


def collect(*rewards, on_error="raise", completions=("a", "bb"), **columns):
    named = {reward.__name__: reward for reward in rewards}
    prompts = ["p"] * len(completions)
    return collect_rewards(named, prompts, completions, columns, len(completions), on_error=on_error)[0]


async def lengths(completions):
    await asyncio.sleep(0)
    return [len(text) for text in completions]


def test_async_rewards_run_concurrently():
    """One after the other, the first would wait for ever; so would the one that is no coroutine."""
    asked, told, here = asyncio.Event(), asyncio.Event(), threading.Event()

    async def first(completions):
        asked.set()
        await asyncio.wait_for(told.wait(), PATIENCE)
        return [1] * len(completions)

    async def second(completions):
        await asyncio.wait_for(asked.wait(), PATIENCE)
        told.set()
        here.set()
        return [2] * len(completions)

    def plain(completions):
        assert here.wait(PATIENCE)
        return [3] * len(completions)

    np.testing.assert_array_equal(collect(first, second, plain), [[1, 2, 3]] * 2)


def test_async_rewards_keep_connections_between_calls():
    """As a client with open connections is, which belongs to the loop that it was made in."""
    kept = []

    async def reward(completions):
        kept.append((asyncio.get_running_loop(), threading.get_ident()))
        return [len(kept)] * len(completions)

    assert collect(reward)[0] == 1 and collect(reward)[0] == 2
    assert kept[0] == kept[1] and kept[0][0] is event_loop() and kept[0][1] != threading.get_ident()


FAULTS = {
    "raises": RuntimeError("the reward is away"),
    "exits": SystemExit(3),
    "is cancelled": asyncio.CancelledError(),
    "one value too few": [1.0],
    "no list": 3.0,
    "nan": [1.0, float("nan")],
    "text": ["good", 1.0],
    "none": [None, 1.0],
    "an array": np.array([1, 2]),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_failures_of_async_rewards_are_reported_as_of_others(fault):
    def plain(completions):
        if isinstance(fault, BaseException):
            raise fault
        return fault

    async def judged(completions):
        await asyncio.sleep(0)
        return plain(completions)

    plain.__name__ = "judged"
    messages = []
    for reward in (judged, plain):
        try:
            messages.append(collect(reward).tolist())
        except RewardError as error:
            told = str(error).partition(" (")[0]  # of one that is cancelled asyncio keeps no line
            messages.append((told, type(error.__cause__).__name__))
    np.testing.assert_equal(*messages)
    both = [collect(reward, lengths, on_error="missing") for reward in (judged, plain)]
    np.testing.assert_array_equal(*both)
    np.testing.assert_array_equal(both[0][:, 1], [1, 2])


def test_a_task_that_exits_does_not_take_the_loop_with_it_and_a_stop_stops():
    async def exits():
        raise SystemExit(3)

    async def judged(completions):
        await asyncio.create_task(exits())

    async def gone(completions):
        raise StopRun("the licence is over")

    with pytest.raises(RewardError, match="reward judged: it raised SystemExit: 3"):
        collect(judged)
    np.testing.assert_array_equal(collect(lengths), [[1], [2]])
    with pytest.raises(StopRun, match="the licence is over"):
        collect(gone, lengths, on_error="missing")


@pytest.mark.parametrize("begun", [True, False], ids=["that has begun", "that has not"])
def test_a_failure_cancels_the_other_async_rewards(begun):
    here, called_off = threading.Event(), threading.Event()

    async def waits(completions):
        here.set()
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            called_off.set()

    def fails(completions):
        assert not begun or here.wait(PATIENCE)
        raise RuntimeError("the reward is away")

    with pytest.raises(RewardError, match="the reward is away"):
        collect(waits, fails)
    assert not begun or called_off.wait(PATIENCE)
    np.testing.assert_array_equal(collect(lengths), [[1], [2]])
    assert len(asyncio.all_tasks(event_loop())) == 0
