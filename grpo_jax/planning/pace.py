"""`--plan --judges …`: seconds of an iteration, the stage that takes longest, and what each next turn would bring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from grpo_jax.config.build import to_dict
from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError
from grpo_jax.planning.advice import Change
from grpo_jax.planning.copies import cards_of, chunk_of, completions_of, judges_of, pools_of, stages_of, work_of
from grpo_jax.planning.measured import SAMPLE, Measured, read_measured
from grpo_jax.planning.request import JUDGES, MEMORY, PLAN, Request
from grpo_jax.planning.stages import UPDATE, Stages, iteration_seconds, slowest

_WORTH = 1.01  # times as fast: what brings less is not worth a line
_IDLE = 1.05  # times what evenly spread work would take: from there on it is said that actors wait


class Turn(NamedTuple):
    """A change and what comes of it."""

    words: str
    seconds: float
    slowest: str
    cards: float


def show_pace(config: Any, request: Request) -> None:
    """Prints how long an iteration of a config would take, by measured seconds.

    Args:
        config: The run.
        request: `times` says where the seconds stand; with `gib` parts are placed on these devices.

    Raises:
        UserError: There is no language policy, or no such seconds.
    """
    if not isinstance(config, Config):
        name = to_dict(config)["task"]["kind"]
        raise UserError(f"{PLAN} {JUDGES}: a {name} run has no language policy and no such stages")
    measured = read_measured(request.times or "", config)
    work = work_of(measured, config)
    stages = stages_of(config, work, request.gib)
    _tell_stages(config, measured, stages)
    seconds = iteration_seconds(stages)
    count = completions_of(config)
    print(f"An iteration: {_spelt(seconds)} s, {count / max(seconds, 1e-9):.3g} completions a second.")
    print(f"The slowest stage: {slowest(stages)}.")
    for line in _waiting(config):
        print(line)
    _tell_turns(turns(config, work, request.gib), seconds, cards_of(config))
    print("Taken for granted:")
    for line in _assumptions(config, measured, request):
        print(f"  - {line}")


def turns(config: Config, work: dict[str, float], gib: tuple[float, ...] = ()) -> list[Turn]:
    """What each change to a config would come to, the best first.

    Left out are changes that the config or the cards refuse, and those of which a part alone comes to as much.
    """
    found = []
    for change in _changes(config):
        try:
            stages = stages_of(change.config, work, gib)
        except UserError:  # it takes more cards than there are
            continue
        found.append(Turn(change.words, iteration_seconds(stages), slowest(stages), cards_of(change.config)))
    needed = [turn for turn in found if not any(_is_part(other, turn) for other in found)]
    return sorted(needed, key=lambda turn: (turn.seconds, turn.cards))


def _is_part(some: Turn, turn: Turn) -> bool:
    """Whether a turn is another one and more, for nothing."""
    options, more = (set(one.words.removeprefix("--").split(" --")) for one in (some, turn))
    return options < more and some.seconds <= turn.seconds


def _changes(config: Config) -> Iterator[Change]:
    """Twice of what there is, even work for actors, larger or smaller chunks, the next batch ahead."""
    rows = chunk_of(config) * config.sampling.group_size
    for name, pool in pools_of(config).items():
        yield from _even(_pooled(Change("", config), name, "replicas", 2 * pool.replicas), name, rows)
        yield from _even(Change("", config), name, rows)
    for name in [name for name in config.judges if name not in pools_of(config)]:
        yield _pooled(Change("", config), name, "replicas", 2)
    training, policy = config.training, config.policy
    prompts, chunk = training.prompts_per_batch, chunk_of(config)
    for size in dict.fromkeys((-(-chunk // 2), min(2 * chunk, prompts))):
        if size != chunk:
            yield from _tried(config, training={"chunk_prompts": size})
    yield from _tried(config, policy={"mesh.fsdp": 2 * policy.mesh.fsdp})
    if not training.lag:
        yield from _tried(config, training={"lag": 1})
    if policy.sampler_devices != "own":
        yield from _tried(config, training={} if training.lag else {"lag": 1}, policy={"sampler_devices": "own"})


def _even(change: Change, name: str, rows: int) -> Iterator[Change]:
    """A change, where it is one, with batches that share the rows of a chunk out evenly among a judge's actors."""
    even = pools_of(change.config)[name].even(rows)
    if even or change.words:
        yield _pooled(change, name, "batch", even) if even else change


def _pooled(change: Change, name: str, field: str, value: int) -> Change:
    kinds, judge = own_package("bridges", "pool.section"), change.config.judges[name]
    before = judge if isinstance(judge, kinds.Pooled) else kinds.Pooled(judge)
    after = dataclasses.replace(before, pool=dataclasses.replace(before.pool, **{field: value}))
    judges, devices = {**change.config.judges, name: after}, dict(change.config.devices)
    words = f"{change.words} --judges.{name}.{field} {value}".strip()
    if devices.get(name, "cpu") != "cpu":  # it is nowhere here any more
        devices[name] = "cpu"
        words += f" --devices.{name} cpu"
    return Change(words, dataclasses.replace(change.config, judges=judges, devices=devices))


def _tried(config: Config, **sections: dict[str, Any]) -> Iterator[Change]:
    """The config with fields of sections changed, unless it refuses them."""
    words = []
    try:
        after = {}
        for section, fields in sections.items():
            value = getattr(config, section)
            for name, to in fields.items():
                words.append(f"--{section}.{name} {to}")
                value = _with(value, name.split("."), to)
            after[section] = value
        yield Change(" ".join(words), dataclasses.replace(config, **after))
    except UserError:
        return


def _with(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return dataclasses.replace(section, **{first: _with(getattr(section, first), rest, value) if rest else value})


# --------------------------------------------------------------------------------------------------------- what is said


def _tell_stages(config: Config, measured: Measured, stages: Stages) -> None:
    training, group = config.training, config.sampling.group_size
    chunks = -(-training.prompts_per_batch // chunk_of(config))
    cut = f"in {chunks} {'chunk' if chunks == 1 else 'chunks'}, lag {training.lag}"
    print(
        f"Pace of {to_dict(config)['task']['kind']}: {training.prompts_per_batch} prompts x {group} completions {cut}"
    )
    given = "measured" if measured.config is not None else "given"
    count = measured.completions or completions_of(measured.config or config)
    print(f"  seconds of an iteration of {count} completions: {measured.where}")
    if measured.config is not None and measured.total is not None:
        own = iteration_seconds(stages_of(measured.config, work_of(measured, measured.config)))
        print(f"  an iteration of that run: {_spelt(measured.total)} s measured, {_spelt(own)} s by this reckoning")
    print(f"  {'stage':<8}{given:>10}{'here':>10}  by")
    for stage, seconds in [*stages.seconds.items(), (UPDATE, stages.update)]:
        times = f"{_spelt(measured.seconds[stage]):>10}{_spelt(seconds):>10}"
        print(f"  {stage:<8}{times}  {_made_by(config, stage)}")


def _made_by(config: Config, stage: str) -> str:
    if stage in (SAMPLE, UPDATE):
        size = config.policy.mesh.size
        own = ", of the sampler's own" if stage == SAMPLE and config.policy.sampler_devices == "own" else ""
        return f"policy, {size} {'device' if size == 1 else 'devices'}{own}"
    pools = pools_of(config)
    made = [
        f"{name}, {pools[name].replicas} {'replica' if pools[name].replicas == 1 else 'replicas'}"
        if name in pools
        else f"{name}, in the run's process"
        for name in judges_of(config, stage)
    ]
    return "; ".join(made) or "the run's process"


def _waiting(config: Config) -> Iterator[str]:
    """Pools of which some actors have nothing to do."""
    rows = chunk_of(config) * config.sampling.group_size
    for name, pool in pools_of(config).items():
        if pool.share(rows) * pool.replicas >= _IDLE:
            batches = -(-rows // pool.rows)
            busy = 1 / (pool.share(rows) * pool.replicas)
            counted = f"{batches} {'batch' if batches == 1 else 'batches'} of {min(pool.rows, rows)}"
            yield f"{name}: a chunk of {rows} completions is {counted}: {pool.replicas} replicas are busy {busy:.0%}"


def _tell_turns(found: list[Turn], before: float, cards: float) -> None:
    worth = [turn for turn in found if before >= _WORTH * turn.seconds]
    print("Next turns, each alone, the best first:" if worth else "No turn brings 1 % alone.")
    width = max((len(turn.words) for turn in worth), default=0)
    for turn in worth:
        more = turn.cards - cards
        cost = f"; {more:g} {'card' if more == 1 else 'cards'} more" if more > 0 else ""
        cost += "; off-policy by one iteration" if "training.lag" in turn.words else ""
        faster = f"{_spelt(turn.seconds):>6} s  {before / max(turn.seconds, 1e-9):.2f}x"
        print(f"  {turn.words:<{width}}  {faster}  slowest: {turn.slowest}{cost}")
    rest = [turn.words for turn in found if turn not in worth]
    if rest and worth:
        print("  less than 1 %:")
        print("\n".join(f"  {words}" for words in rest))


def _assumptions(config: Config, measured: Measured, request: Request) -> Iterator[str]:
    if measured.config is None:
        yield "the given seconds are those of one replica of each judge and one device of the policy"
    else:
        yield "sizes, steps and lengths are those of the measured run"
    if measured.completions or measured.config is not None:
        yield "a stage's seconds grow with the completions of an iteration"
    yield "twice the replicas, or devices of the policy, take half the time; what they say to each other takes none"
    yield "chunks cost nothing by themselves (a sampler that reads all weights for each is slower with more of them)"
    if config.policy.sampler_devices != "own":
        yield "at lag 1 sampling and the update take turns on the policy's devices"
    if not request.gib and any(name not in pools_of(config) for name in config.judges):
        yield f"judges in the run's process share no card ({MEMORY} 80,80 would place them)"
    several = [stage for stage in measured.seconds if len(judges_of(config, stage)) > 1]
    if several:
        yield f"{several[0]}: all its seconds are those of the judge with the fewest replicas"
    if config.sampling.turns > 1:
        yield "several turns: an estimate, with each stage's seconds of all turns together"
    if config.algorithm.dead_groups == "resample":
        yield "as many draws as were measured, one after the other"
    if measured.config is not None and measured.config.training.lag:
        yield "measured at lag 1, where stages on one device slow each other: lag 0 measures them apart"
    yield "validation, checkpoints and what lies between two iterations are not counted"


def _spelt(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 100 else f"{seconds:.1f}"
