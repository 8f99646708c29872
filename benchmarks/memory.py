"""Temporary memory of an update's loss and gradient: log-probabilities in chunks against all logits at once.

    python benchmarks/memory.py [--output benchmarks/memory.json]

The program is compiled for arrays that do not exist and XLA says how much temporary memory it allocates
(`memory_analysis`); nothing is run. It is the part of an update behind the decoder: from hidden states [1, T, D] to
log-probabilities, entropies and a loss, and back to the gradients of states and head. Those two gradients are results,
not temporaries. In chunks the temporaries are one chunk's logits and, from the second chunk on, one product of the
head's shape before it is added to the sum: neither grows with T. A frozen head (LoRA) has no such product. What is
linear in T and has no vocabulary in it is listed apart: a copy of the states and what comes back to them, 4·T·D bytes
each.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from grpo_jax.core.logprobs import token_logprobs

VOCABULARY, WIDTH, LENGTHS, CHUNKS = 151_936, 896, (64, 128, 256, 512, 1024), (64, 256, 1024)
FROZEN_CHUNK = 64
MIB = 2**20


def all_logits(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies as they are usually written, for automatic differentiation."""
    logs = jax.nn.log_softmax(jnp.einsum("ptd,vd->ptv", hidden, head))
    chosen = jnp.take_along_axis(logs, tokens[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logs) * logs, axis=-1)


def temporary_bytes(
    length: int, chunk: int | None, *, vocabulary: int = VOCABULARY, width: int = WIDTH, frozen_head: bool = False
) -> int:
    """Temporary memory of the compiled loss and gradient for T = length; all logits at once where chunk is None."""

    def loss(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> jax.Array:
        given = (hidden, head, tokens)
        logprobs, entropy = all_logits(*given) if chunk is None else token_logprobs(*given, chunk_size=chunk)
        return jnp.mean(logprobs) + 0.01 * jnp.mean(entropy)

    shapes = (
        jax.ShapeDtypeStruct((1, length, width), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
        jax.ShapeDtypeStruct((1, length), jnp.int32),
    )
    compiled = jax.jit(jax.value_and_grad(loss, argnums=0 if frozen_head else (0, 1))).lower(*shapes).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def measure() -> dict:
    """All rows, with what they were measured on."""
    rows = []
    for length in LENGTHS:
        chunked = {chunk: temporary_bytes(length, chunk) for chunk in CHUNKS if chunk <= length}
        rows.append(
            {
                "tokens": length,
                "all_logits": temporary_bytes(length, None),
                "chunked": chunked,
                "chunked_frozen_head": temporary_bytes(length, FROZEN_CHUNK, frozen_head=True),
                "one_array_of_logits": 4 * length * VOCABULARY,
                "states": 2 * 4 * length * WIDTH,
            }
        )
    return {
        "vocabulary": VOCABULARY,
        "width": WIDTH,
        "head_bytes": 4 * VOCABULARY * WIDTH,
        "rows": rows,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "backend": jax.default_backend(),
    }


def table(result: dict) -> str:
    """The rows as a Markdown table in MiB."""
    heads = [
        "T",
        "all logits",
        *(f"chunks of {chunk}" for chunk in CHUNKS),
        "of 64, frozen head",
        "states, linear in T",
    ]
    lines = ["| " + " | ".join(heads) + " |", "| ---: " * len(heads) + "|"]
    for row in result["rows"]:
        chunked = [f"{row['chunked'][chunk] / MIB:,.0f}" if chunk in row["chunked"] else "" for chunk in CHUNKS]
        cells = [str(row["tokens"]), f"{row['all_logits'] / MIB:,.0f}", *chunked]
        cells += [f"{row['chunked_frozen_head'] / MIB:,.0f}", f"{row['states'] / MIB:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table, and JSON to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    given = parser.parse_args(arguments)
    result = measure()
    print(table(result))
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
