"""Writes the trained policy as a Hugging Face folder, or its adapters alone as a PEFT folder.

python -m grpo_jax.export --run DIR --out FOLDER [--checkpoint best] [--adapters]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_jax.errors import UserError


def export_policy(
    folder: str | Path, loaded: Any, variables: dict[str, Any], lora: Any, *, dtype: str = "float32"
) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads (Qwen2-VL: `AutoModelForImageTextToText`).

    Args:
        folder: Where to; it appears at once, when complete.
        loaded: The folder the policy came from, as read.
        variables: Its variables; adapters are merged into the weights, in float32 and a layer at a time.
        lora: The adapters' config, or None.
        dtype: Type of the language model's weights. In float32 nothing that was trained is rounded away; bfloat16
            keeps little of what small adapters changed. Tensors that are not the policy's (a vision tower) are copied
            as they are.

    Raises:
        UserError: The folder cannot be written.
    """
    from grpo_jax.models import hf
    from grpo_jax.models.lora import merging

    hf.save_folder(folder, loaded.folder, loaded.config, merging(variables, lora), dtype=dtype)


def export_adapters(folder: str | Path, loaded: Any, variables: dict[str, Any], lora: Any) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads onto the base model.

    Args:
        folder: Where to; it appears at once, when complete.
        loaded: The folder the policy came from, as read.
        variables: Its variables.
        lora: The adapters' config.

    Raises:
        UserError: There are no adapters, or the folder cannot be written.
    """
    from grpo_jax.models.peft import save_adapters

    if lora is None:
        raise UserError("--adapters: this run trained all weights and has none (policy.lora.rank 0)")
    save_adapters(folder, variables["lora"], lora, loaded.config, base=loaded.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    from grpo_jax.runs.parts import guarded

    parser = argparse.ArgumentParser(
        prog="python -m grpo_jax.export",
        description="Restores a policy from a run directory and writes it as a Hugging Face folder, adapters merged.",
    )
    parser.add_argument("--run", required=True, metavar="DIR", help="Run directory of a training run.")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="Folder to write.")
    parser.add_argument("--checkpoint", default="final", help="final, best, or a step (default: %(default)s).")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="Type of the weights (default: float32, which rounds nothing away).",
    )
    parser.add_argument(
        "--adapters", action="store_true", help="Write the LoRA adapters alone, in PEFT's format (float32)."
    )
    parser.add_argument("--debug", action="store_true", help="Show tracebacks.")
    options = parser.parse_args(arguments)
    return guarded(lambda: _export_run(options), debug=options.debug)


def _export_run(options: argparse.Namespace) -> None:
    from grpo_jax.runs.parts import restore_policy

    if options.adapters and options.dtype:
        raise UserError("--adapters: adapters are float32, --dtype is for the whole policy")
    loaded, _, lora, variables, meta = restore_policy(options.run, options.checkpoint)
    if options.adapters:
        export_adapters(options.out, loaded, variables, lora)
    else:
        export_policy(options.out, loaded, variables, lora, dtype=options.dtype or "float32")
    what = "adapters" if options.adapters else "policy"
    print(f"{options.out}: the {what} of {options.run}, checkpoint {options.checkpoint} (step {meta.get('step')})")


if __name__ == "__main__":
    sys.exit(main())
