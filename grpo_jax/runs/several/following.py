"""A language run in any process but the first: its part of process 0's calls, of the same config and folder."""

from __future__ import annotations

import dataclasses
from typing import Any

import orbax.checkpoint as ocp

from grpo_jax.config import Config
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import on_host
from grpo_jax.runs.iteration import LearningBrief, led_learner
from grpo_jax.runs.parts import ask_for_determinism
from grpo_jax.runs.policy import load_run_policy
from grpo_jax.runs.series import READ, WRITE
from grpo_jax.runs.several.company import Follower
from grpo_jax.runs.several.devices import place_policy, policy_devices
from grpo_jax.runs.several.led import Brief, led_samplers, led_see
from grpo_jax.runs.trees import handler, read_tree, write_trees
from grpo_jax.runs.warm_start import led_sft


def follow(config: Config, follower: Follower) -> Any:
    """Take part in a run until process 0 ends it, and return what it ended with."""
    if config.deterministic:
        ask_for_determinism(torch_too=False)
    places = place_policy(config, processes=follower.processes)
    devices = policy_devices(places, config.policy, processes=follower.processes)
    loaded: list[Policy] = []

    def load(run_dir: str, pictures: bool) -> Policy:
        own = dataclasses.replace(config, run_dir=run_dir)
        loaded.append(load_run_policy(own, devices[: config.policy.mesh.size], lambda *_: None, pictures=pictures))
        return loaded[0]

    def sampling(brief: Brief) -> None:
        led_samplers(config, loaded[0], brief, follower)
        led_see(loaded[0], brief, follower)

    def learning(brief: LearningBrief) -> None:
        led_learner(config, loaded[0], brief, follower)

    def sft(brief: LearningBrief) -> None:
        led_sft(config, loaded[0], brief, follower)

    for function in (load, sampling, learning, sft):
        follower.lead(function.__name__, function)
    follower.lead("whole", on_host)
    checkpointer = ocp.AsyncCheckpointer(handler())
    follower.lead(WRITE, lambda path, trees: write_trees(checkpointer, path, trees))
    follower.lead(READ, read_tree)
    try:
        return follower.follow()
    finally:
        checkpointer.close()
