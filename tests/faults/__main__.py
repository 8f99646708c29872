"""One kind of fault in a process of its own: an outcome per line, as JSON.

python -m faults KIND FOLDER SEED COUNT [NAME …]
"""

import importlib
import json
import sys
from pathlib import Path

kind, folder, seed, count, *names = sys.argv[1:]
module = importlib.import_module(f"faults.{kind}")
more = {"names": tuple(names)} if names else {}
for outcome in module.campaign(Path(folder), int(seed), int(count), **more):
    print(json.dumps(outcome._asdict()), flush=True)
