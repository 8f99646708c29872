"""Configs and command lines of every task, valid ones mutated: they parse, or are refused in one line."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import yaml
from faults.fuzz.mutations import ODD_TEXTS, entry, mutated_bytes, odd_value, places, tried
from faults.outcome import Outcome

from grpo_jax.config.command_line import load_config, parse
from grpo_jax.config.fields import to_yaml
from grpo_jax.config.run import Config

TASKS = ("text", "prompt_enhancement", "recommendation", "environment")
TEXTS = (
    "",
    "[]",
    "text",
    "task: text\ntask: environment\n",
    "task: text\nsampling: {top_k: 1, top_k: 2}\n",
    "a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]\n"
    "d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]\ntask: [*d, *d, *d, *d, *d, *d, *d, *d, *d, *d, *d, *d, *d]\n",
    "&a [*a]",
    "task: text\nwatch: " + "[" * 3000,
    "task: text\nseed: " + "9" * 5000,
    "task: text\ndata: {prompts: 2001-99-99}\n",
    "task: !!python/object/apply:os.system [true]\n",
    "task: text\n<<: 3\n",
    "? [a, b]\n: c\n",
)


def campaign(folder: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Parses `count` files and command lines, one outcome each."""
    rng = random.Random(seed)
    valid = {task: parse(["--task", task]).model_dump() for task in TASKS}
    for number in range(count):
        yield tried(*_case(folder, rng, valid, f"{seed}/{number}"), folder)


def _case(folder: Path, rng: random.Random, valid: dict[str, dict], number: str):
    task = rng.choice(TASKS)
    path = folder / "config.yaml"
    how = rng.randrange(4)
    if how == 0:
        words = _words(rng, valid[task])
        return f"{number} {task} {str(words)[:120]}", lambda: _used(parse(["--task", task, *words]))
    if how == 1:
        path.write_bytes(_text(rng, valid[task]))
        loads = rng.random() < 0.5
        return f"{number} bytes of {task}", lambda: _used(load_config(path) if loads else parse([f"--config={path}"]))
    values = _changed(rng, valid[task])
    path.write_bytes(yaml.safe_dump(values, allow_unicode=rng.random() < 0.5).encode("utf-8", "surrogatepass"))
    words = _words(rng, valid[task]) if how == 3 else []
    return f"{number} {task} file and {str(words)[:80]}", lambda: _used(parse([f"--config={path}", *words]))


def _used(config: Config) -> None:
    """Check that an accepted config can be written and read again."""
    text = to_yaml(config)
    text.encode()


def _text(rng: random.Random, values: dict) -> bytes:
    data = rng.choice(TEXTS).encode() if rng.random() < 0.1 else yaml.safe_dump(values).encode()
    if rng.random() < 0.1:
        return data.decode().encode(rng.choice(["utf-16", "utf-32", "latin-1"]))
    return mutated_bytes(rng, data) if rng.random() < 0.8 else data


def _changed(rng: random.Random, values: dict) -> dict:
    values = copy.deepcopy(values)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        *path, last = rng.choice(places(values))
        inner = entry(values, path)
        how = rng.randrange(5)
        if how == 0:
            del inner[last]
        elif how == 1 and isinstance(inner, dict):
            inner[odd_value(rng, 9) if rng.random() < 0.5 else f"{last}s"] = inner.pop(last)
        else:
            inner[last] = odd_value(rng)
    return values


def _words(rng: random.Random, values: dict) -> list[str]:
    words: list[str] = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        place = ".".join(map(str, rng.choice(places(values))))
        place = rng.choice([place] * 6 + [f"{place}+", f"{place}.x", place[:-1], f".{place}", place.upper()])
        place = rng.choice(ODD_TEXTS) if rng.random() < 0.05 else place
        if rng.random() < 0.02:
            place = "a." * 3000 + "b"
        value = yaml.safe_dump(odd_value(rng), default_flow_style=True) if rng.random() < 0.5 else rng.choice(ODD_TEXTS)
        words += [f"--{place}={value}"] if rng.random() < 0.5 else [f"--{place}", value]
    return [*words, *rng.choice([[]] * 20 + [["--print_config"], ["--resume"], ["-h"], ["--"], ["--config"]])]
