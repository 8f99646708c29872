"""How long an iteration takes whose stages take so long: the timetable of `rollout.pipeline` as a formula.

Stage i works s_i seconds of a batch, which goes through in chunks, each the share w of it. The first chunk passes all
stages, and behind it the busiest stage has the rest:

    M = w · Σ s_i + (1 - w) · max s_i                          a batch, sampled and judged
    lag 0    M + u                                             u: the update
    lag 1    max(s_1, …, s_n, u, (M + u) / 2)                  batches follow each other through the stages

At lag 1 update n waits for batch n, and batch n+2 for update n: the two go round in two iterations. Where chunks are
alike and nobody shares a card this is what the pipeline does; with a smaller last chunk it is an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

UPDATE = "update"
"""What `seconds/update` of metrics.jsonl is: the stage that learns."""


class Stages(NamedTuple):
    """The stages of an iteration.

    Attributes:
        seconds: Seconds of work on one batch by stage, in the order of the pipe; `UPDATE` apart.
        update: Seconds of learning from one batch.
        share: What a chunk is of a batch, in (0, 1].
        lag: 0, or 1 where the next batch is on its way during the update.
        follows: At lag 1, whether a stage begins with a batch when it is done with the one before; otherwise a batch
            begins when the one before is judged as a whole.
        in_flight: Chunks that may be on their way at once; 0 for no limit.
        in_turns: Names of stages that take turns, since they have a card in common; `UPDATE` may be among them.
    """

    seconds: Mapping[str, float]
    update: float
    share: float = 1.0
    lag: int = 0
    follows: bool = True
    in_flight: int = 0
    in_turns: tuple[frozenset[str], ...] = ()


def batch_seconds(stages: Stages) -> float:
    """Seconds from the first chunk's begin to the last one's end, of a batch alone (M)."""
    whole = sum(stages.seconds.values())
    busiest = _busiest(stages.seconds, stages.in_turns)
    if stages.in_flight:  # a chunk begins when one of so many has passed all stages
        busiest = max(busiest, whole / stages.in_flight)
    return stages.share * whole + (1 - stages.share) * busiest


def iteration_seconds(stages: Stages) -> float:
    """Seconds from one update's end to the next one's, once the pipe is filled."""
    batch = batch_seconds(stages)
    if not stages.lag:
        return batch + stages.update
    busiest = _busiest({**stages.seconds, UPDATE: stages.update}, stages.in_turns)
    return max(busiest, (batch + stages.update) / 2 if stages.follows else batch)


def slowest(stages: Stages) -> str:
    """The stage that works longest, the update among them; "one and another" where these take turns and hold it up."""
    seconds = {**stages.seconds, UPDATE: stages.update}
    work = dict(seconds)
    for group in stages.in_turns:
        members = [name for name in seconds if name in group and (stages.lag or name != UPDATE)]
        if len(members) > 1:
            work[" and ".join(members)] = sum(seconds[name] for name in members)
    return max(work, key=work.__getitem__)


def _busiest(seconds: Mapping[str, float], in_turns: tuple[frozenset[str], ...]) -> float:
    """Seconds of the stage, or of the stages with one card, that have most to do."""
    together = [sum(seconds.get(name, 0.0) for name in group) for group in in_turns]
    return max([*seconds.values(), *together], default=0.0)
