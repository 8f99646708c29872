"""Kinds of faults in a process of their own: an outcome per line, as JSON.

python -m faults FOLDER SEED KIND:COUNT[:NAME,NAME…] …
"""

import importlib
import json
import sys
from pathlib import Path

folder, seed, *kinds = sys.argv[1:]
if any(wanted.startswith("disk:") for wanted in kinds):
    importlib.import_module("faults.disk").prepare(Path(folder))
for wanted in kinds:
    kind, count, *names = wanted.split(":")
    module = importlib.import_module(f"faults.{kind}")
    more = {"names": tuple(names[0].split(","))} if names else {}
    for outcome in module.campaign(Path(folder) / kind, int(seed), int(count), **more):
        print(json.dumps({"kind": kind, **outcome._asdict()}), flush=True)
