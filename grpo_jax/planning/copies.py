"""What the replicas and devices of a config make of its stages' seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from grpo_jax.config.named import own_package
from grpo_jax.config.run import POLICY, Config
from grpo_jax.errors import UserError
from grpo_jax.planning.cards import SAMPLER, places_of
from grpo_jax.planning.measured import RENDER, SAMPLE, SCORE, Measured
from grpo_jax.planning.request import JUDGES
from grpo_jax.planning.stages import UPDATE, Stages
from grpo_jax.rollout.turns import IN_FLIGHT

_DRAWS = "renderer"  # the judge that draws, by its name (docs/judges.md); the others score


class Pool(NamedTuple):
    """The actors of a judge.

    Attributes:
        replicas: How many.
        rows: Of a batch that one of them is given.
        cards: Of each.
    """

    replicas: int
    rows: int
    cards: float

    def share(self, completions: int) -> float:
        """Seconds for so many completions over those of one actor: what the busiest of them has of the rows.

        Batches are as long as their rows; one that is left over is shorter.
        """
        whole, rest = divmod(completions, self.rows)
        turns, over = divmod(whole, self.replicas)
        return (turns * self.rows + (self.rows if over else rest)) / completions

    def even(self, completions: int) -> int:
        """Rows of a batch that share so many completions out in less time, in as many turns; 0 where none are known."""
        turns = -(-completions // (self.replicas * self.rows))
        rows = -(-completions // (turns * self.replicas))
        return rows if self._replace(rows=rows).share(completions) < self.share(completions) else 0


def pools_of(config: Config) -> dict[str, Pool]:
    """The judges that are in a pool."""
    pooled = {name: config.judges[name] for name in config.elsewhere}
    return {name: Pool(judge.pool.replicas, _rows(judge), judge.pool.cards) for name, judge in pooled.items()}


def _rows(judge: Any) -> int:
    own = getattr(judge, "batch_size", None)
    return judge.pool.batch or own or own_package("bridges", "pool.pooled").ROWS


def judges_of(config: Config, stage: str) -> list[str]:
    """Names of the judges that work in a stage."""
    return [name for name in config.judges if (RENDER if name == _DRAWS else SCORE) == stage]


def completions_of(config: Config) -> int:
    """Of an iteration, P·G."""
    return config.training.prompts_per_batch * config.sampling.group_size


def chunk_of(config: Config) -> int:
    """Prompts of a chunk."""
    prompts = config.training.prompts_per_batch
    return min(config.training.chunk_prompts or prompts, prompts)


def cards_of(config: Config) -> float:
    """Cards of the policy and of pools; those of judges in the run's own process are not known to a config."""
    return config.policy.devices + sum(pool.replicas * pool.cards for pool in pools_of(config).values())


def share_of(config: Config, stage: str) -> float:
    """Seconds of a stage over what it takes with one replica of each judge and one device of the policy.

    The work of a stage with several judges is taken to be that of the one whose share is largest.
    """
    if stage in (SAMPLE, UPDATE):
        return 1 / config.policy.mesh.size
    rows, pools = chunk_of(config) * config.sampling.group_size, pools_of(config)
    return max((pools[name].share(rows) if name in pools else 1.0 for name in judges_of(config, stage)), default=1.0)


def work_of(measured: Measured, config: Config) -> dict[str, float]:
    """Seconds for one completion by stage, with one replica of each judge and one device of the policy.

    Raises:
        UserError: A judge of the config works in a stage of which nothing was measured.
    """
    for stage in (RENDER, SCORE):
        missing = judges_of(config, stage)
        if missing and stage not in measured.seconds:
            raise UserError(
                f"{JUDGES}: {measured.where} has no seconds of {stage}, in which judges.{missing[0]} works; measure a "
                "run that has it, or give its seconds too"
            )
    source = measured.config
    count = measured.completions or completions_of(source or config)
    shares = {stage: share_of(source, stage) if source else 1.0 for stage in measured.seconds}
    return {stage: seconds / count / shares[stage] for stage, seconds in measured.seconds.items()}


def stages_of(config: Config, work: Mapping[str, float], gib: tuple[float, ...] = ()) -> Stages:
    """The stages of a config's iteration.

    Args:
        config: Its replicas, devices, chunks and lag.
        work: Of `work_of`.
        gib: Memory of each device that parts are placed on; () where each is taken to have one of its own.
    """
    count = completions_of(config)
    seconds = {stage: one * count * share_of(config, stage) for stage, one in work.items()}
    update, once = seconds.pop(UPDATE), config.sampling.turns == 1
    return Stages(
        seconds,
        update,
        share=chunk_of(config) / config.training.prompts_per_batch,
        lag=config.training.lag,
        follows=once and config.algorithm.dead_groups != "resample",
        in_flight=0 if once else IN_FLIGHT,
        in_turns=_in_turns(config, gib),
    )


def _in_turns(config: Config, gib: tuple[float, ...]) -> tuple[frozenset[str], ...]:
    """Stages that have a card in common: sampler and update unless the sampler has its own, others where placed so."""
    own = config.policy.sampler_devices == "own"
    policy = [UPDATE] if own else [SAMPLE, UPDATE]
    stages = {POLICY: policy, SAMPLER: [SAMPLE]}
    stages |= {name: [RENDER if name == _DRAWS else SCORE] for name in config.judges}
    cards: dict[str, set[str]] = {}
    for part, where in places_of(config, len(gib)).items() if gib else ():
        for card in where:
            if card != "cpu":
                cards.setdefault(card, set()).update(stages[part])
    groups = [frozenset(policy), *map(frozenset, cards.values())]
    return tuple(dict.fromkeys(group for group in groups if len(group) > 1))
