"""`python -m grpo_jax.export --run DIR --out FOLDER [--checkpoint best] [--adapters | --renderer] [--push_to_hub …]`.

Write the trained policy as a Hugging Face folder, or only its adapters as a PEFT folder, or a trained renderer's LoRA.
"""

from __future__ import annotations

import argparse
from typing import Any

from grpo_jax.config.fields import require
from grpo_jax.errors import UserError, command, exit_process, run_parser


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    description = "Restore a policy from a run directory and write it as a Hugging Face folder, with merged adapters."
    parser = run_parser("export", description)
    add, dtypes = parser.add_argument, ("float32", "bfloat16", "float16")
    add("--out", required=True, metavar="FOLDER", help="Folder to write.")
    add("--dtype", choices=dtypes, help="Type of the weights (default: float32, without rounding).")
    add("--adapters", action="store_true", help="Write only the LoRA adapters, in PEFT's format (float32).")
    add("--renderer", action="store_true", help="Write the trained renderer's LoRA weights instead, as diffusers does.")
    add("--push_to_hub", metavar="OWNER/NAME", help="Push the folder to the Hugging Face hub too.")
    add("--private", action="store_true", help="Make the repository of --push_to_hub private; it may not be public.")
    return parser


def _export(options: argparse.Namespace) -> None:
    from grpo_jax.models.hf.folder import push_folder, require_hub, write_card
    from grpo_jax.runs.policy import restore_policy

    if options.private and not options.push_to_hub:
        raise UserError("--private: it is for a repository of --push_to_hub")
    if options.renderer:
        alone = not (options.adapters or options.dtype or options.push_to_hub)
        require(alone, "--renderer", "no --adapters, --dtype or --push_to_hub, which are the policy's", "them")
        return _export_renderer(options)
    if options.adapters and options.dtype:
        raise UserError("--adapters: adapters are float32, --dtype is for the whole policy")
    if options.push_to_hub:
        require_hub(options.push_to_hub)
    config, policy, meta = restore_policy(options.run, options.checkpoint)
    if options.adapters:
        policy.save_adapters(options.out, policy.variables)
    else:
        policy.save(options.out, policy.variables, dtype=options.dtype or "float32")
    write_card(options.out, base=config.policy.path, adapters=options.adapters)
    what = "adapters" if options.adapters else "policy"
    print(f"{options.out}: the {what} of {options.run}, checkpoint {options.checkpoint} (step {meta.get('step')})")
    if options.push_to_hub:
        print(f"pushed to {push_folder(options.out, options.push_to_hub, private=options.private)}")


def _export_renderer(options: argparse.Namespace) -> None:
    from pathlib import Path

    from grpo_jax.config.run import RENDERER
    from grpo_jax.runs.loading import trainable_renderer
    from grpo_jax.runs.policy import run_config, saved_renderer

    config = run_config(options.run)
    require(config.renderer_learns, "--renderer", "a run that trains its renderer (training.learns)", options.run)
    judge: Any = config.judges[RENDERER]  # with `train`
    judge.check()
    renderer = trainable_renderer(config, judge.load("cpu"))
    renderer.restore(saved_renderer(renderer.state(), options.run, options.checkpoint))
    renderer.save_lora(Path(options.out))
    print(f"{options.out}: the renderer's LoRA weights of {options.run}, checkpoint {options.checkpoint}; to use them:")
    print(f'  pipeline = {type(renderer.pipeline).__name__}.from_pretrained("{judge.path}")')
    if merged := getattr(judge, "lora", ""):  # the run trained on top of it
        print(f'  pipeline.load_lora_weights("{merged}")')
        print("  pipeline.fuse_lora(components=[*pipeline.get_list_adapters()]); pipeline.unload_lora_weights()")
    print(f'  pipeline.load_lora_weights("{options.out}")')


main = command(make_parser, _export)

if __name__ == "__main__":
    exit_process(main())
