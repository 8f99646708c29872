"""Writes the trained policy as a Hugging Face folder, or its adapters alone as a PEFT folder.

python -m grpo_jax.export --run DIR --out FOLDER [--checkpoint best] [--adapters]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from grpo_jax.errors import UserError, guarded, leave, version


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_jax.export",
        description="Restores a policy from a run directory and writes it as a Hugging Face folder, adapters merged.",
    )
    parser.add_argument("--run", required=True, metavar="DIR", help="Run directory of a training run.")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="Folder to write.")
    parser.add_argument("--checkpoint", default="final", help="final, best, latest, or a step (default: %(default)s).")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="Type of the weights (default: float32, which rounds nothing away).",
    )
    parser.add_argument(
        "--adapters", action="store_true", help="Write the LoRA adapters alone, in PEFT's format (float32)."
    )
    parser.add_argument("--version", action="version", version=version())
    parser.add_argument("--debug", action="store_true", help="Show tracebacks.")
    options = parser.parse_args(arguments)
    return guarded(lambda: _export_run(options), debug=options.debug)


def _export_run(options: argparse.Namespace) -> None:
    from grpo_jax.models.hf.exporting import export_adapters, export_policy
    from grpo_jax.runs.policy import restore_policy

    if options.adapters and options.dtype:
        raise UserError("--adapters: adapters are float32, --dtype is for the whole policy")
    _, policy, meta = restore_policy(options.run, options.checkpoint)
    if options.adapters:
        export_adapters(options.out, policy.loaded, policy.variables, policy.lora)
    else:
        export_policy(options.out, policy.loaded, policy.variables, policy.lora, dtype=options.dtype or "float32")
    what = "adapters" if options.adapters else "policy"
    print(f"{options.out}: the {what} of {options.run}, checkpoint {options.checkpoint} (step {meta.get('step')})")


def command() -> NoReturn:
    """`main` as a process of its own."""
    leave(main())


if __name__ == "__main__":
    command()
