"""CartPole's peer: the same GRPO and PPO as a plain PyTorch loop over gymnasium.

Network, batch, losses and settings are those of grpo_jax.cartpole. Carts of an iteration are stepped together by
gymnasium's CartPole written in NumPy, forward passes are batched and in inference mode, the update sees the steps that
happened and no padding. `benchmarks/cartpole.py` runs it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch import Tensor, nn

from grpo_jax.cartpole.program import EVERY
from grpo_jax.cartpole.settings import Settings
from grpo_jax.cartpole.training import (
    CLIP,
    ENTROPY_COEF,
    ENVIRONMENTS,
    EPISODES,
    GAE_LAMBDA,
    HIDDEN,
    KL_COEF,
    MAX_GRAD_NORM,
    MINIBATCHES,
    STEPS,
    VALUE_COEF,
)

START = 0.05  # each number of a start is uniform in ±0.05


class Steps(NamedTuple):
    """Steps of R carts, time first."""

    observations: np.ndarray  # [T, R, 4], before the step
    actions: np.ndarray  # [T, R]
    mask: np.ndarray  # [T, R], the steps that happened
    terminated: np.ndarray  # [T, R]
    truncated: np.ndarray  # [T, R], ended by the time limit alone
    following: np.ndarray  # [T, R, 4], after the step and before a reset


class Batch(NamedTuple):
    """The steps of one update: one after the other `[S]`, or PPO's `[T, R]`."""

    observations: Tensor  # [.., 4]
    actions: Tensor  # [..], 1 for right
    old_logprobs: Tensor  # [..]
    advantages: Tensor  # [..]
    returns: Tensor  # [..], targets of PPO's values


class Carts:
    """R carts in gymnasium's NumPy environment."""

    def __init__(self, count: int, rng: np.random.Generator):
        self.rng, self.envs = rng, CartPoleVectorEnv(count)
        self.envs.reset(seed=0)

    def place(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """Begins new episodes; the environment's own reset would cost a step."""
        self.envs.state[:, rows], self.envs.steps[rows], self.envs.prev_done[rows] = starts.T, 0, False

    def step(self, actions: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All carts; what comes from those that are over is not used."""
        self.envs.prev_done[~alive] = False
        observations, _, terminated, truncated, _ = self.envs.step(actions)
        return observations, terminated & alive, truncated & ~terminated & alive


def starts(rng: np.random.Generator, count: int) -> np.ndarray:
    """Fresh states `[count, 4]`."""
    return rng.uniform(-START, START, (count, 4))


def draw(policy: nn.Module, observations: np.ndarray) -> np.ndarray:
    """An action for each observation."""
    return torch.bernoulli(torch.sigmoid(policy(torch.from_numpy(observations)))[:, 0]).to(torch.int64).numpy()


def likelier(policy: nn.Module, observations: np.ndarray) -> np.ndarray:
    """The action of probability above a half."""
    return (policy(torch.from_numpy(observations))[:, 0] > 0).to(torch.int64).numpy()


@torch.inference_mode()
def play_episodes(carts: Carts, policy: nn.Module, states: np.ndarray, act=draw) -> Steps:
    """One episode from each state."""
    count = len(states)
    carts.place(np.arange(count), states)
    rows, observations, alive = [], states.astype(np.float32), np.ones(count, bool)
    while alive.any():
        actions = act(policy, observations)
        following, terminated, truncated = carts.step(actions, alive)
        rows.append((observations, actions, alive, terminated, truncated, following))
        observations, alive = following, alive & ~(terminated | truncated)
    return Steps(*(np.stack(column) for column in zip(*rows, strict=True)))


@torch.inference_mode()
def play_steps(carts: Carts, policy: nn.Module, observations: np.ndarray, count: int):
    """A number of steps of every cart, starting anew where an episode ends; and where the carts are then."""
    rows, alive = [], np.ones(len(observations), bool)
    for _ in range(count):
        actions = draw(policy, observations)
        following, terminated, truncated = carts.step(actions, alive)
        rows.append((observations, actions, alive, terminated, truncated, following))
        observations, over = following, np.flatnonzero(terminated | truncated)
        if len(over):
            fresh = starts(carts.rng, len(over))
            carts.place(over, fresh)
            observations = following.copy()
            observations[over] = fresh
    return Steps(*(np.stack(column) for column in zip(*rows, strict=True))), observations


def make_network(hidden: Sequence[int], gain: float) -> nn.Sequential:
    """Perceptron with one output and orthogonal weights, the last layer's scaled by `gain`."""
    sizes, layers = [4, *hidden], []
    for inputs, width in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, width), nn.Tanh()]
    layers.append(nn.Linear(sizes[-1], 1))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def logprobs_of(policy: nn.Module, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the actions, and entropies: with log-odds z, log σ(z) = -softplus(-z)."""
    odds = policy(observations)[..., 0]
    right, left = nn.functional.logsigmoid(odds), nn.functional.logsigmoid(-odds)
    probability = torch.sigmoid(odds)
    return torch.where(actions == 1, right, left), -(probability * right + (1 - probability) * left)


def policy_loss(policy: nn.Module, batch: Batch, settings: Settings) -> Tensor:
    """Clipped surrogate, k3 KL to the reference (the policy that the iteration began with), entropy bonus."""
    logprobs, entropy = logprobs_of(policy, batch.observations, batch.actions)
    difference = batch.old_logprobs - logprobs
    ratio = torch.exp(-difference)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
    if settings.algorithm != "ppo":
        loss = loss + KL_COEF * (torch.expm1(difference) - difference).mean()
    return loss - ENTROPY_COEF * entropy.mean()


def value_loss(value: nn.Module, batch: Batch) -> Tensor:
    """Half the squared error."""
    return 0.5 * (value(batch.observations)[..., 0] - batch.returns).square().mean()


def discounted_returns(mask: np.ndarray, gamma: float) -> np.ndarray:
    """Discounted sum of what is still to come, `[T, R]`; every step that happens pays 1."""
    returns, following = np.zeros(mask.shape, np.float32), np.zeros(mask.shape[1], np.float32)
    for step in reversed(range(len(returns))):
        following = (1 + gamma * following) * mask[step]
        returns[step] = following
    return returns


def group_batch(steps: Steps, policy: nn.Module, settings: Settings) -> Batch:
    """GRPO: returns normalised over all steps of a group; rows of a group stand side by side."""
    returns = discounted_returns(steps.mask, settings.gamma)
    advantages = np.zeros_like(returns)
    size = settings.group_size
    for start in range(0, steps.mask.shape[1], size):
        columns = slice(start, start + size)
        exists = steps.mask[:, columns]
        lengths = exists.sum(0)
        if lengths.min() < lengths.max():  # episodes that all went alike have nothing to teach
            present = returns[:, columns][exists]
            advantages[:, columns][exists] = (present - present.mean()) / (present.std(ddof=1) + 1e-4)
    taken = [torch.from_numpy(a[steps.mask]) for a in (steps.observations, steps.actions, advantages)]
    with torch.no_grad():
        old, _ = logprobs_of(policy, taken[0], taken[1])
    return Batch(taken[0], taken[1], old, taken[2], old)  # no values


def value_batch(steps: Steps, policy: nn.Module, value: nn.Module, settings: Settings) -> Batch:
    """PPO: GAE; a termination is worth nothing afterwards, the time limit bootstraps."""
    observations, following = torch.from_numpy(steps.observations), torch.from_numpy(steps.following)
    actions = torch.from_numpy(steps.actions)
    with torch.no_grad():
        here, after = value(observations)[..., 0].numpy(), value(following)[..., 0].numpy()
        old, _ = logprobs_of(policy, observations, actions)
    residual = 1 + settings.gamma * after * ~steps.terminated - here
    carry = settings.gamma * GAE_LAMBDA * ~(steps.terminated | steps.truncated)
    advantages, later = np.zeros_like(here), np.zeros(here.shape[1], np.float32)
    for step in reversed(range(len(here))):
        later = residual[step] + carry[step] * later
        advantages[step] = later
    return Batch(observations, actions, old, *map(torch.from_numpy, (advantages, advantages + here)))


class Learner:
    """Networks, optimizer and carts of one run."""

    def __init__(self, settings: Settings, seed: int):
        torch.manual_seed(seed)
        self.settings, self.rng, self.updates = settings, np.random.default_rng(seed), 0
        self.policy = make_network(HIDDEN, 0.01)
        self.value = make_network(HIDDEN, 1.0) if settings.algorithm == "ppo" else None
        networks = [self.policy] + ([self.value] if self.value else [])
        self.parameters = [weight for network in networks for weight in network.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, settings.learning_rate, eps=1e-5, fused=True)
        self.count = ENVIRONMENTS if self.value else settings.group_size
        self.carts = Carts(self.count, self.rng)
        self.judged = Carts(EPISODES, self.rng)
        if self.value:
            first = starts(self.rng, self.count)
            self.carts.place(np.arange(self.count), first)
            self.observations = first.astype(np.float32)

    def collect(self) -> tuple[Batch, int]:
        """Plays one iteration: the batch, and its number of steps."""
        if self.value:
            steps, self.observations = play_steps(self.carts, self.policy, self.observations, STEPS)
            return value_batch(steps, self.policy, self.value, self.settings), steps.mask.size
        states = np.repeat(starts(self.rng, 1), self.count, axis=0)
        steps = play_episodes(self.carts, self.policy, states)
        return group_batch(steps, self.policy, self.settings), int(steps.mask.sum())

    def loss(self, batch: Batch) -> Tensor:
        """Policy loss, and PPO's value loss."""
        settings = self.settings
        if not self.value:
            return policy_loss(self.policy, batch, settings)
        advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-4)
        loss = policy_loss(self.policy, batch._replace(advantages=advantages), settings)
        return loss + VALUE_COEF * value_loss(self.value, batch)

    def update(self, batch: Batch) -> None:
        """Several passes over the batch; PPO's minibatches are times with all carts, drawn once for all passes."""
        epochs, parts = self.settings.epochs, [batch]
        if self.value:
            order = torch.randperm(len(batch.actions)).chunk(MINIBATCHES)
            parts = [Batch(*(column[rows] for column in batch)) for rows in order]
        for part in parts * epochs:
            if self.value:
                total = self.settings.iterations * epochs * MINIBATCHES
                self.optimizer.param_groups[0]["lr"] = self.settings.learning_rate * (1 - self.updates / total)
            self.optimizer.zero_grad()
            self.loss(part).backward()
            nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
            self.optimizer.step()
            self.updates += 1

    def evaluate(self) -> float:
        """Mean return of fresh episodes with the likelier action."""
        states = starts(self.rng, EPISODES)
        return float(play_episodes(self.judged, self.policy, states, likelier).mask.sum(0).mean())


def train(settings: Settings, seed: int) -> dict:
    """One run: steps, seconds, evaluations as (iteration, environment steps, seconds, mean return)."""
    learner, total, evaluations = Learner(settings, seed), 0, []
    began = time.perf_counter()
    for iteration in range(1, settings.iterations + 1):
        batch, steps = learner.collect()
        learner.update(batch)
        total += steps
        if iteration % EVERY == 0:
            evaluations.append((iteration, total, time.perf_counter() - began, learner.evaluate()))
    seconds = time.perf_counter() - began
    return {"seed": seed, "steps": total, "seconds": seconds, "evaluations": evaluations}
