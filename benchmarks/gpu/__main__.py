"""All measurements that need a GPU, in one command; without a GPU at tiny sizes on the CPU.

    python benchmarks/gpu [--tiny] [--parts correctness handover …] [--out benchmarks/gpu.json]

Each part runs in its own process (tiny ones share one), mostly under two minutes, and eight minutes in all. A part
without its package, or without time left, is skipped with the reason. `--parts NAME` gives a part its whole limit.
Writes one JSON and prints one table. The exit code is 1 if anything failed or disagreed.
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
