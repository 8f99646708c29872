"""Run every function against its oracles on random numbers and write docs/oracles.md.

pip install -e ".[diffusion,test,oracles]"
python docs/make_oracles.py
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

import numpy as np  # noqa: E402
from oracles import (  # noqa: E402
    oracle,
    oracle_rlax,
    oracle_scipy,
    oracle_trl_cases,
    oracle_trl_selection,
)

SOURCES = {
    "TRL": [*oracle_trl_cases.CASES, *oracle_trl_selection.CASES],
    "rlax and optax": oracle_rlax.CASES,
    "SciPy, scikit-learn, NumPy": oracle_scipy.CASES,
}
PACKAGES = ("jax", "numpy", "trl", "torch", "transformers", "rlax", "optax", "scipy", "scikit-learn")
HEADER = """# The maths against outside oracles

`python docs/make_oracles.py` writes this page; do not edit it. Each line compares a function of grpo_jax with one
of another library on the same random numbers, with {seeds} draws of every setting (`tests/oracles`). A figure is
the largest absolute difference. In "float64" both sides use float64; in "float32" grpo_jax uses float32 and the
oracle float64. Gradients of losses are with respect to log-probabilities and entropies, others to all floating
inputs. Values are of order 1, gradients of losses of order 0.05. The tests require {bounds}.

{date} · Python {python} · {versions} · {machine}
"""
FOOTER = """
## Differences from TRL

`tests/core/test_trl.py` shows both sides of each difference.

| subject | TRL | grpo_jax |
|---|---|---|
| row without tokens (a masked truncated completion) | counts in the number of rows | counts in no divisor |
| `bnpo` | divides by the tokens of each micro-batch | divides by the tokens of the update |
| corrected KL with a row ratio (GSPO) | is multiplied by the row's ratio | is multiplied by the token's ratio |
| row ratio with an advantage per token | every token of the row gets the gradient of every advantage | GSPO-token: a \
token's advantage moves that token |
| dual clip (`delta`) below 1 + high | also clips the ratio of positive advantages | bounds negative advantages only |
| entropy bonus with a mask of high-entropy tokens | mean over the selected tokens | mean over all tokens |
| entropy quantile that falls on a token | float32 rounding may exclude that token | includes the token |
| importance weights with a mask | drops weights below `vllm_importance_sampling_clip_min`, by default none | drops \
weights below 1 / cap |
| NaN from the sampler, in importance weights | gets weight 1 | stays NaN |
| missing reward in a sum | counts as 0 | counts as its group's mean of that reward |
"""


def largest(cases, seeds):
    """(function, oracle) → the largest difference of value and gradient in both types."""
    rows = defaultdict(lambda: defaultdict(float))
    for case in cases:
        function = case.function.partition(",")[0] if case.function.startswith("GRPOMetrics") else case.function
        row = rows[function, case.oracle]
        for dtype in (np.float64, np.float32):
            for seed in range(seeds):
                for kind, found in zip(("value", "gradient"), oracle.run(case, seed, dtype), strict=True):
                    if found is not None:
                        key = kind, dtype
                        row[key] = max(row[key], found)
        print(f"{case.function}: {case.setting}", file=sys.stderr)
    return rows


def table(rows):
    """The rows as Markdown."""
    lines = [
        "| function | oracle | value, float64 | gradient, float64 | value, float32 | gradient, float32 |",
        "|---|---|---|---|---|---|",
    ]
    for (function, name), row in rows.items():
        numbers = [
            f"{row[kind, dtype]:.0e}" if (kind, dtype) in row else "–"
            for dtype in (np.float64, np.float32)
            for kind in ("value", "gradient")
        ]
        numbers = ["0" if number == "0e+00" else number for number in numbers]
        lines.append(f"| `{function}` | `{name}` | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="random draws of every setting")
    arguments = parser.parse_args()
    text = HEADER.format(
        seeds=arguments.seeds,
        bounds="1e-6 (TRL) and 1e-10 (the other libraries)",
        date=datetime.datetime.now(datetime.UTC).date(),
        python=platform.python_version(),
        versions=" · ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES),
        machine=f"{platform.system()} {platform.machine()}, CPU",
    )
    for title, cases in SOURCES.items():
        text += f"\n## {title}\n\n{table(largest(cases, arguments.seeds))}\n"
    (HERE / "oracles.md").write_text(text + FOOTER)


if __name__ == "__main__":
    main()
