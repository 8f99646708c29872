"""Prompt files, valid ones mutated: `load_prompts` reads them, or gives the reason in one line."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from faults.fuzz.mutations import mutated_bytes, odd_value, tried
from faults.outcome import Outcome

from grpo_jax.rollout.prompts import load_prompts

WORDS = ("a red fox", "Ein Haus am See", "東京の夜", "two\tcats", "été", "🦊 in snow", "<|im_end|>", '"quoted"', "a\\b")


def campaign(folder: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Reads `count` prompt files, one outcome each."""
    rng = random.Random(seed)
    for number in range(count):
        yield tried(*_case(folder, rng, f"{seed}/{number}"), folder)


def _case(folder: Path, rng: random.Random, number: str):
    records = [_record(rng) for _ in range(rng.choice([1, 4, 12]))]
    kind = rng.choice(["jsonl", "jsonl", "jsonl", "txt", "records"])
    if rng.random() < 0.7:
        record = rng.choice(records)
        name = rng.choice(["prompt", "split", "images", "completions", "wish", str(odd_value(rng, 9))])
        record[name] = odd_value(rng)
    if kind == "records":
        return f"{number} records", lambda: _used(load_prompts(records))
    ending = rng.choice(["\n", "\n", "\r\n", "\r", "\u2028"])
    lines = [json.dumps(record, ensure_ascii=rng.random() < 0.5) for record in records]
    text = ending.join(lines if kind == "jsonl" else [str(record.get("prompt")) for record in records])
    data = text.encode(rng.choice(["utf-8"] * 6 + ["utf-16", "utf-32", "utf-8-sig"]), "surrogatepass")
    if rng.random() < 0.6:
        data = mutated_bytes(rng, data)
    path = folder / f"prompts.{kind}"
    path.write_bytes(data)
    return f"{number} {kind} {data[:60]!r}", lambda: _used(load_prompts(path, held_out=rng.choice([0.0, 0.2, 0.4, 1])))


def _used(prompts) -> None:
    """What is read can be written again: to UTF-8, and to JSON as it is."""
    for part in prompts:
        for row in part:
            row.prompt.encode()


def _record(rng: random.Random) -> dict:
    record: dict = {"prompt": f"{rng.choice(WORDS)} {rng.randrange(99)}"}
    if rng.random() < 0.3:
        record["split"] = rng.choice(["train", "train", "test", "validation"])
    if rng.random() < 0.5:
        record["wish"] = rng.choice([1, 2.5, "a", ["x"], {"y": 1}, None])
    return record
