"""All measurements that need a GPU, in four calls; with `--tiny` a rehearsal of them on a CPU.

    python benchmarks/gpu --call A|B|C|D [--tiny] [--programs DIR] [--budget SECONDS] [--out FILE]

docs/development.md lists their measurements. A and B together fit a GPU that is lent for a quarter of an hour, and so
do C and D; without `--call` all four run. Each part of a call has a process and a limit of its own. A part that fails
prints its traceback, and the next one goes on. FILE has every measurement as soon as it is made; `.log` beside it has
all output. `--programs` keeps compiled programs for the next call. The exit code is 1 if a measurement failed,
disagreed, or is missing, unless its package (torch, trl, vllm, …) is not installed.

For a machine without a network, `prepare.sh` beside this file downloads the wheels that these parts take.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Scripts beside this one, other benchmarks, the checkout itself, and the tests' tiny models.
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
sys.path.append(str(HERE.parents[1] / "tests"))

if __name__ == "__main__":
    from driver import main

    sys.exit(main())
