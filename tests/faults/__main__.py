"""Kinds of faults in a process of their own: an outcome per line, as JSON.

python -m faults FOLDER SEED KIND:COUNT[:NAME,NAME…] …
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path


def main(folder: Path, seed: int, kinds: list[str]) -> None:
    """Runs campaigns one after the other; each kind is the module of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for wanted in kinds:
        kind, count, *names = wanted.split(":")
        module = importlib.import_module(f"faults.{kind}")
        started = time.monotonic()
        more = {"names": tuple(names[0].split(","))} if names else {}
        for outcome in module.campaign(folder, seed, int(count), **more):
            seconds, started = time.monotonic() - started, time.monotonic()
            print(json.dumps({"kind": kind, "seed": seed, **outcome._asdict(), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), sys.argv[3:])
