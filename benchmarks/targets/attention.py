"""Attention of prompts and completions in training, compiled for a GPU without one: kernels, memory and bytes.

    pip install "grpo_jax[targets]" nvidia-cudnn-cu13
    python benchmarks/targets/attention.py [--target h100] [--kinds cuda cudnn blocks]

8 prompts of 256 tokens with 8 completions of 256 each, in bfloat16; 2 key heads of 128 and 6 query heads of each, as in
Qwen2.5-1.5B. The kinds are those of `choose_attention`. cuDNN's workspace is missing: XLA asks for it on a GPU alone.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
from launches import parse_program, steps

from grpo_jax.models.attention import Context, LayerInput, Tokens, attend_streams
from grpo_jax.planning.programs import Program, compile_program, count_work, read_memory
from grpo_jax.planning.targets import Target, open_devices, prepare

PROMPTS, GROUP, LENGTH, STEPS, KEYS, QUERIES, SIZE = 8, 8, 256, 256, 2, 6, 128


def total(kind: str, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum the attention of a layer."""
    places = jnp.cumsum(mask, axis=-1) - 1
    after = Tokens(places[:, -1:] + 1 + jnp.arange(STEPS), jnp.ones((PROMPTS, STEPS), bool))
    context = Context(places, Tokens(places, mask), after)
    return attend_streams(query, key, value, LayerInput(), context, attention=kind)[0].astype(jnp.float32).sum()


def main() -> None:
    """Print a row of each kind, for the forward pass and for the gradient with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100")
    parser.add_argument("--kinds", nargs="+", default=["cuda", "cudnn", "blocks"])
    options = parser.parse_args()
    prepare()
    target, length = Target(options.target), LENGTH + GROUP * STEPS
    shapes = [(PROMPTS, length, KEYS, *more, SIZE) for more in ((QUERIES,), (), ())]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    mask = jax.ShapeDtypeStruct((PROMPTS, LENGTH), bool)
    print("| attention | pass | kernels | temporary MB | GFLOP |\n|---|---|---|---|---|")
    for kind in options.kinds:
        for name, change in (("forward", lambda f: f), ("and gradient", lambda f: jax.grad(f, (0, 1, 2)))):
            attend = change(lambda *given, kind=kind: total(kind, *given))
            program = Program(jax.jit(attend), (*arrays, mask))
            compiled = compile_program(program, target, open_devices(target)[0])
            report = read_memory(compiled, count_work(program))
            kernels = sum(step.times for step in steps(*parse_program(compiled.as_text())))
            figures = f"{kernels} | {report.temporary_bytes / 1e6:.0f} | {report.work.flops / 1e9:.0f}"
            print(f"| {kind} | {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
