"""Train seeds of CartPole in parallel, print and write the returns as they learn, and measure saved parameters."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.cartpole.settings import MAX_STEPS, Settings
from grpo_jax.cartpole.training import EPISODES, SOLVED, Carry, Metrics, make_training
from grpo_jax.errors import UserError, one_line, short_name

EVERY = 10
"""Iterations between measurements; as many are compiled into one function."""
_PARAMETERS = "parameters"
say = partial(print, flush=True)  # at once, also into a pipe


def train(settings: Settings, seed: int, count: int, out: Path | None) -> None:
    """Train `count` seeds from `seed` on and print returns; write the results to `out`, a new or an empty folder."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UserError(f"--out {short_name(out)}: expected a new or an empty folder")
    split_processor()
    training, devices, began = make_training(settings), seed_devices(count), time.monotonic()
    title = f"CartPole-v1, {settings.algorithm}, {' + '.join(settings.objectives)}"
    say(f"{title}: seeds {seed} to {seed + count - 1}, on {', '.join(map(str, devices))}")
    state = over_seeds(training.init, devices)(seed_keys(seed, count))
    measure = over_seeds(training.evaluate, devices)
    returns = {0: np.asarray(measure(state)["episode_return"])}
    ends = [*range(EVERY, settings.iterations, EVERY), settings.iterations]
    lengths = np.diff(ends, prepend=0).tolist()
    blocks = {
        length: over_seeds(lambda state, length=length: training.train(state, length), devices).lower(state).compile()
        for length in sorted(set(lengths))
    }
    say(f"compiled in {time.monotonic() - began:.1f} s; {_shown(returns[0])} before training")
    began, solved_at = time.monotonic(), np.zeros(count, np.int64)
    for end, length in zip(ends, lengths, strict=True):
        state, metrics, measures = jax.block_until_ready(blocks[length](state))
        returns[end] = np.asarray(measures["episode_return"])
        steps = np.asarray(state.steps, np.int64)
        solved_at = np.where((returns[end] >= SOLVED) & (solved_at == 0), steps, solved_at)
        if out is not None:
            _append(out / "metrics.jsonl", end, metrics, measures)
        say(f"iteration {end:>4}: {_shown(returns[end])}")
    seconds, total = time.monotonic() - began, steps.sum()
    first = f"; first solved after {np.median(solved_at[solved_at > 0]):,.0f} (median)" if solved_at.any() else ""
    say(f"{total:,} environment steps, {total / seconds:,.0f} per second{first}")
    if out is not None:
        (out / "curve.svg").write_text(draw_curve(title, returns))
        _save(out / _PARAMETERS, state)
        say(f"saved in {out}")
    # One more than the last measurement's number: these starts have not influenced any choice.
    _report(measure(state._replace(iteration=state.iteration + 1)))


def measure_saved(folder: Path) -> None:
    """Measure the parameters that `train` wrote to a folder, on the starts of its last measurement."""
    split_processor()
    state = _restore(folder)
    measure = over_seeds(make_training(Settings()).evaluate, seed_devices(len(state.iteration)))
    _report(measure(state._replace(iteration=state.iteration + 1)))


def _shown(returns: np.ndarray) -> str:
    solved = f"{(returns >= SOLVED).sum()} of {len(returns)} solved"
    return f"return {returns.mean():.1f} ({returns.min():.1f} to {returns.max():.1f}), {solved}"


def _report(measures: Metrics) -> None:
    """Print each seed's return, the means, and the number of solved seeds."""
    returns = np.asarray(measures["episode_return"])
    say(f"returns over {EPISODES} greedy episodes each: {', '.join(f'{value:.1f}' for value in returns)}")
    centred, distance = (np.mean(measures[name]) for name in ("centred", "distance"))
    means = f"mean return {returns.mean():.1f} of {MAX_STEPS}, centred {centred:.1f}, {distance:.2f} from the middle"
    say(f"{means}; solved from {SOLVED:g}\n{(returns >= SOLVED).sum()} of {len(returns)} solved")


def _append(path: Path, end: int, metrics: Metrics, measures: Metrics) -> None:
    """Write a row for each iteration up to `end`, means over the seeds with a number; the last has the measures."""
    table = {name: np.ma.masked_invalid(values).mean(axis=0, dtype=np.float64) for name, values in metrics.items()}
    returns = np.asarray(measures["episode_return"])
    last = {f"evaluation/{name}": float(np.mean(values)) for name, values in measures.items()}
    last |= {"evaluation/lowest": float(returns.min()), "evaluation/highest": float(returns.max())}
    columns = [column.tolist() for column in table.values()]  # None where no seed has a number
    rows = [dict(zip(table, values, strict=True)) for values in zip(*columns, strict=True)]
    rows[-1] |= last | {"solved": int((returns >= SOLVED).sum())}
    with open(path, "a", encoding="utf-8") as file:
        for step, row in enumerate(rows, end - len(rows) + 1):
            file.write(json.dumps({"step": step} | row) + "\n")


def draw_curve(title: str, returns: dict[int, np.ndarray]) -> str:
    """Return an SVG picture of returns `[seeds]` by iteration: the mean, and a band from the lowest to the highest."""
    last = max(returns)

    def place(iteration: int, value: float) -> str:
        return f"{50 + 420 * iteration / last:.1f},{210 - 180 * value / MAX_STEPS:.1f}"

    mean = " ".join(place(iteration, values.mean()) for iteration, values in returns.items())
    upper = [place(iteration, values.max()) for iteration, values in returns.items()]
    lower = [place(iteration, values.min()) for iteration, values in returns.items()]
    axis = f'<path d="M{place(0, MAX_STEPS)} L{place(0, 0)} L{place(last, 0)}" fill="none" stroke="#8a8f98"/>'
    texts = ((8, 35, MAX_STEPS), (8, 214, 0), (50, 228, 0), (440, 228, last), (230, 228, "iteration"), (50, 18, title))
    return "\n".join([
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 490 240" font-family="sans-serif" font-size="12">',
        f'<rect width="490" height="240" fill="white"/>{axis}',
        *(f'<text x="{x}" y="{y}">{text}</text>' for x, y, text in texts),
        f'<polygon points="{" ".join([*upper, *reversed(lower)])}" fill="#2a6fdb" fill-opacity="0.2"/>',
        f'<polyline points="{mean}" fill="none" stroke="#2a6fdb" stroke-width="2"/>',
        "</svg>\n",
    ])  # fmt: skip


def _save(folder: Path, state: Carry) -> None:
    """Write each seed's parameters, key and iteration as NumPy arrays, which any number of devices reads."""
    import orbax.checkpoint as ocp

    saved = {"variables": state.variables, "key": jax.random.key_data(state.key), "iteration": state.iteration}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), jax.tree.map(np.asarray, saved))


def _restore(folder: Path) -> Carry:
    import orbax.checkpoint as ocp

    path = (folder / _PARAMETERS).absolute()
    if not path.is_dir():
        raise UserError(f"--evaluate {short_name(folder)}: no {_PARAMETERS} there; give a folder of --out")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            saved = checkpointer.restore(path)
        key, iteration = jax.random.wrap_key_data(jnp.asarray(saved["key"])), saved["iteration"]
        return Carry(saved["variables"], None, (), key, iteration, np.zeros_like(iteration))
    except Exception as error:
        raise UserError(f"--evaluate {short_name(path)}: cannot be read ({one_line(error)})") from error


def seed_keys(seed: int, number: int) -> jax.Array:
    """Return the keys of seeds seed, seed + 1, …, to vmap over; a seed's result does not depend on the others."""
    return jax.vmap(jax.random.key)(jnp.arange(seed, seed + number))


def split_processor() -> None:
    """Request one CPU device per core; without effect if JAX has started, or XLA_FLAGS sets a number.

    The networks are too small to split one product between threads, so cores share whole seeds.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", cores)


def seed_devices(seeds: int) -> list[jax.Device]:
    """Return the largest number of JAX's devices that divides the seeds evenly."""
    devices = jax.devices()
    return devices[: max(count for count in range(1, len(devices) + 1) if seeds % count == 0)]


def over_seeds(function: Callable, devices: Sequence[jax.Device]) -> Callable:
    """Compile `function` for many seeds, the first axis of all arguments and results.

    Each device runs its seeds independently: a loop ends when the device's last seed is done.
    """
    mesh, seeds = Mesh(devices, ("seed",)), PartitionSpec("seed")
    # Nothing is reduced over devices, so the check of such reductions is not needed.
    shared = jax.shard_map(jax.vmap(function), mesh=mesh, in_specs=seeds, out_specs=seeds, check_vma=False)
    return jax.jit(shared, in_shardings=NamedSharding(mesh, seeds), out_shardings=NamedSharding(mesh, seeds))
