"""A loaded run: everything that its config names."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from grpo_jax.config.run import Config
from grpo_jax.core.trie import Trie
from grpo_jax.models.broadcast import any_process, is_main_process
from grpo_jax.models.policy import Policy
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.pipeline import Work
from grpo_jax.rollout.reward_registry import ResolvedRewards
from grpo_jax.rollout.rewards import JudgedBatch
from grpo_jax.rollout.rollout import RolloutFns
from grpo_jax.sampling.samplers import Samplers
from grpo_jax.tasks.task import TaskData

if TYPE_CHECKING:
    from bridges.trainable import TrainableRenderer


class RunContext(NamedTuple):
    """Everything that a config names, loaded; only `runs` uses it."""

    config: Config
    task_data: TaskData
    policy: Policy
    fns: RolloutFns
    rewards: ResolvedRewards
    samplers: Samplers
    allowed_tokens: np.ndarray | None  # bool [V]; None for all
    trie: Trie | None  # the task's choices (`TaskData.choices`)
    key: jax.Array  # the run's, from which all others are folded
    devices: dict[str, str]  # names of policy's and judges' devices
    iterations: int  # total
    renderer: TrainableRenderer | None = None  # judges.renderer if it is trained
    stopping: Callable[[], bool] = lambda: False  # whether a stop was requested

    @property
    def policy_device(self) -> jax.Device:
        """Return the first of the policy's devices in this process."""
        leaf = jax.tree.leaves(self.policy.variables)[0]
        return min(leaf.sharding.addressable_devices, key=lambda device: device.id)

    def is_stopped(self) -> bool:
        """Return in all processes whether a stop was requested in any of them."""
        return any_process(self.stopping())

    @property
    def test_rows(self) -> Sequence[Row]:
        """Return the held-out prompts for the reported results."""
        return self.task_data.prompts.test[: self.config.evaluation.prompts or None]

    @property
    def validation_rows(self) -> Sequence[Row]:
        """Return the held-out prompts that select "best"."""
        return self.task_data.prompts.validation[: self.config.evaluation.validation_prompts]

    @property
    def measure_names(self) -> tuple[str, ...]:
        """Return the names of rewards and eval rewards, N + W."""
        return self.fns.reward_names + self.fns.eval_reward_names

    def work(
        self,
        chunk_prompts: int,
        locks: defaultdict[str, threading.Lock] | None = None,
        judged: JudgedBatch | None = None,
        *,
        missing: bool | None = None,
    ) -> Work:
        """Make a batch's pipeline through sampler and judges, with `chunk_prompts` prompts at a time (0: all).

        `judged` is the batch of an iteration; None for held-out prompts. `missing` is whether failing rewards are
        missing; None as configured.
        """
        stopping = self.stopping if is_main_process() else lambda: False  # process 0 tells the others
        judged = judged or JudgedBatch(None, self.iterations)
        return Work(chunk_prompts, self.config.judge_timeout or None, stopping, locks, judged.columns, missing)
