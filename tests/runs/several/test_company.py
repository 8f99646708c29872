"""What process 0 calls is called in the others, with the same arguments; arrays of the mesh go by number."""

import queue

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.runs.several.company import Follower, Leader


class Line:
    """Messages of one process to another, in this one."""

    def __init__(self):
        self.messages = queue.Queue()

    def tell(self, message, patience=None):
        self.messages.put(message)

    def hear(self):
        return self.messages.get_nowait()


@pytest.fixture
def both():
    line = Line()
    return Leader(2, line), Follower(2, line)


def test_a_state_stays_where_it_is_and_what_is_given_back_unchanged_has_one_name(both):
    leader, follower = both
    held = []

    def start(size):
        return {"frozen": jnp.full(size, 3.0), "moving": jnp.zeros(size)}

    def step(state, by):
        return {"frozen": state["frozen"], "moving": state["moving"] + by * state["frozen"]}

    def held_step(state, by):
        held[:] = [*held[-1:], state]
        return step(state, by)

    follower.lead("start", start), follower.lead("step", held_step)
    state = leader.lead("start", start)(5)
    advance = leader.lead("step", step)
    for number in range(9):
        state = advance(state, number)
    leader.end(None)
    follower.follow()
    np.testing.assert_array_equal(held[-1]["moving"] + 8 * held[-1]["frozen"], state["moving"])
    assert all(one["frozen"] is held[0]["frozen"] for one in held)
    # What process 0 let go the others hold no longer than to the next call: the last state, and the one before.
    assert len(follower._arrays) <= 2 * 2 and len(leader._arrays) <= 2 * 2


def test_what_process_0_frees_is_freed_everywhere_and_can_still_be_a_template(both):
    leader, follower = both
    theirs = []

    def keep(tree):
        theirs.append(tree)

    make = jnp.ones
    follower.lead("make", make), follower.lead("keep", keep)
    array = leader.lead("make", make)((2, 3))
    look = leader.lead("keep", lambda tree: None)
    look([array])
    array.delete()
    look([array])
    leader.end(None)
    follower.follow()
    assert theirs[0][0] is theirs[1][0] and theirs[1][0].is_deleted() and theirs[1][0].shape == (2, 3)
