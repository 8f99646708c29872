"""The work of the iteration benchmark, the same for every library: shapes, prompts, reward, and report.

Imported by the workers, each in its own environment: the standard library alone, but for `decoder_config`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

KL_COEF = 0.04
POSITIONS = 1024
PHASES = ("sampling", "logprobs", "update")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Case:
    """A Qwen2 shape (tied embeddings) and the work of one iteration: P prompts, G completions, L and T tokens.

    With a picture in each prompt, of so many pixels each way, it is a Qwen2-VL, and the picture's tokens come on top:
    patches of 14 pixels, four to a token, through `tower_layers` of width `tower_width`.

    With `ends` each token is the last one with probability 1 / ends: lengths are exponential, of about that mean, and T
    is the longest. Else nothing ends before T. `head` is the size of a head where it is not the width over the heads.
    """

    name: str
    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 64
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 704
    vocabulary: int = 4096
    picture: int = 0
    tower_layers: int = 4
    tower_width: int = 128
    ends: int = 0
    head: int = 0

    @property
    def head_size(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def end(self) -> int | None:
        """The token that ends a completion; None where none does."""
        return self.vocabulary - 1 if self.ends else None

    @property
    def learning_rate(self) -> float:
        """Of AdamW; where completions end by themselves too small to change when."""
        return 1e-9 if self.ends else 1e-5

    @property
    def positions(self) -> int:
        """Return the model's maximum positions; more only if the case needs them."""
        return max(POSITIONS, self.prompt_tokens + self.new_tokens)

    @property
    def shape(self) -> str:
        """Names the model's shape: cases of one shape share a folder."""
        own = f"{self.hidden}x{self.layers}x{self.heads}x{self.kv_heads}x{self.mlp}x{self.vocabulary}"
        own += f"-ends{self.ends}" if self.ends else ""
        own += f"-{self.positions}" if self.positions > POSITIONS else ""
        return f"{own}-{self.picture}x{self.tower_layers}x{self.tower_width}" if self.picture else own


def decoder_config(case: Case) -> Any:
    """The shape as our `DecoderConfig`; of its text part, where it has pictures."""
    from grpo_jax.models.architectures.llama import DecoderConfig

    return DecoderConfig(
        model_type="qwen2",
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=case.mlp,
        num_layers=case.layers,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_size,
        qkv_bias=True,
        tie_word_embeddings=True,
    )


CASES = {
    case.name: case
    for case in [
        Case("small"),
        Case("large-vocab", 4, 8, 64, 128, hidden=512, layers=8, heads=8, kv_heads=2, mlp=1408, vocabulary=32000),
        Case("long-prompt", 4, 8, 256, 32),
        Case("unequal", new_tokens=512, ends=64),
        Case("pictures", 4, 8, 32, 32, picture=448),
        Case("tiny", 2, 4, 8, 8, hidden=32, layers=2, mlp=48, vocabulary=64),
        Case("tiny-unequal", 2, 4, 8, 48, hidden=32, layers=2, mlp=48, vocabulary=64, ends=8),
        Case("tiny-pictures", 2, 4, 8, 8, 32, 2, mlp=48, vocabulary=64, picture=56, tower_layers=2, tower_width=32),
    ]
}


VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def words(case: Case) -> list[str]:
    """The vocabulary as text: token i is "ti"; a picture's marks are the last ones."""
    marks = VISION if case.picture else ()
    return [f"t{i}" for i in range(case.vocabulary - len(marks))] + list(marks)


def pictures(case: Case, iteration: int) -> list:
    """A picture of noise for each prompt, other ones in every iteration: uint8 [picture, picture, 3]."""
    import numpy as np  # every environment has it

    rng = np.random.default_rng(iteration)
    return list(rng.integers(0, 256, (case.prompts, case.picture, case.picture, 3), np.uint8))


def prompt_texts(case: Case, iteration: int) -> list[str]:
    """P prompts of exactly L tokens, other ones in every iteration."""
    rng, count = random.Random(iteration), case.vocabulary - (len(VISION) if case.picture else 0)
    return [" ".join(f"t{rng.randrange(count)}" for _ in range(case.prompt_tokens)) for _ in range(case.prompts)]


def reward(case: Case, text: str) -> float:
    """The share of a completion's tokens in the lower half of the vocabulary."""
    ids = [int(number) for number in re.findall(r"t(\d+)", text)]
    return sum(i < case.vocabulary / 2 for i in ids) / case.new_tokens


def peak_mib() -> float:
    """The most memory this process ever had resident, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def versions(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Assignment:
    """A worker's assignment: the case, the model's folder, the number of iterations, and the variant."""

    case: Case
    folder: Path
    iterations: int
    threads: int
    variant: str
    clock: str
    out: Path

    @property
    def now(self) -> Callable[[], float]:
        """Reads the clock: "wall", or "cpu", the seconds of all this process's threads, for a machine that is busy."""
        return CLOCKS[self.clock]


def assignment(arguments: Sequence[str] | None = None) -> Assignment:
    """Reads a worker's command line, as `command_line` writes it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=lambda text: Case(**json.loads(text)), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--out", type=Path, required=True)
    return Assignment(**vars(parser.parse_args(arguments)))


def command_line(given: Assignment) -> list[str]:
    values = {**asdict(given), "case": json.dumps(asdict(given.case))}
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def write_report(given: Assignment, rows: Sequence[dict[str, float]], packages: Sequence[str], **more) -> None:
    """Writes seconds by phase of each iteration (the first compiles), peak memory and versions.

    Args:
        given: The assignment.
        rows: One per iteration: "sampling", "logprobs" and "total" seconds; the rest of the total is the update. And
            "tokens", the number of generated ones, if completions end before T.
        packages: Distributions whose versions matter.
        **more: Further facts.
    """
    if len(rows) != given.iterations:
        raise RuntimeError(f"expected {given.iterations} iterations, timed {len(rows)}")
    whole = {"tokens": given.case.prompts * given.case.group * given.case.new_tokens}
    rows = [{**whole, **row, "update": row["total"] - row["sampling"] - row["logprobs"]} for row in rows]
    report = {"iterations": rows, "peak_mib": peak_mib(), "versions": versions(packages), **more}
    given.out.write_text(json.dumps(report))


def median_row(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each phase over iterations, and of the total (not the sum of the medians)."""
    return {name: statistics.median(row[name] for row in rows) for name in (*PHASES, "total")}
