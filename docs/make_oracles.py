"""Runs every function against its outside oracles on random numbers and writes docs/oracles.md.

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

`python docs/make_oracles.py` writes this page; do not edit. Each line runs one function of grpo_jax and one of
another library on the same random numbers, {seeds} draws of every setting (named in `tests/oracles`), and gives the
largest absolute difference. "float64" has both sides in float64, "float32" ours in float32 against the oracle in
float64. Gradients of losses are with respect to log-probabilities (and entropies), else to all floating inputs.
Values are of order 1, gradients of losses of order 0.05. The tests hold the same comparisons to {bounds}.

{date} · Python {python} · {versions} · {machine}
"""
FOOTER = """
## Differences from TRL

`tests/core/test_trl.py` shows both sides of each.

| subject | TRL | grpo_jax |
|---|---|---|
| row without tokens (a truncated completion that is masked) | counts in the number of rows | counts in no denominator |
| `bnpo` | divides by the tokens of each micro-batch | divides by the tokens of the update |
| corrected KL with a row ratio (GSPO) | times the row's ratio | times the token's ratio |
| row ratio with an advantage per token | every token of the row gets the gradient of every advantage | GSPO-token: a \
token's advantage moves that token |
| dual clip (`delta`) below 1 + high | also cuts the ratio of positive advantages | bounds negative advantages alone |
| entropy bonus with a mask of high-entropy tokens | mean over the selected tokens | mean over all tokens |
| quantile of the entropies that falls on a token | float32 rounding may leave that token out | the token is in |
| NaN from the sampler | weight 1 | stays NaN |
| missing reward, where objectives are summed | adds 0, as if the judge had said 0 | its group's mean of that \
objective: neither punished nor rewarded |
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
