"""Semantic ids of a catalogue: words by which a policy reads and writes items, alike for items that are alike.

On the command line:

    python -m grpo_jax.tasks.recommendation.ranking.semantic_ids --catalogue items.tsv --out ids.tsv
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from grpo_jax.config.named import own_package
from grpo_jax.errors import UserError, carry_out, extras_named, leave, version
from grpo_jax.tasks.recommendation.catalogue import Catalogue, read_catalogue
from grpo_jax.tasks.recommendation.ranking.codes import Codes, residual_codes
from grpo_jax.tasks.recommendation.ranking.ids_file import MOST_LEVELS, words_of, write_ids

WIDTH = 128
"""Sparse vectors (TF-IDF) are projected to so many dimensions, those of their largest singular values; to unit length
again, or what is rare in titles would be near nothing and fall together."""


def title_codes(
    titles: Sequence[str], *, encoder: str = "tfidf", device: str = "cpu", levels: int, size: int, seed: int
) -> Codes:
    """Codes of titles by their vectors (`residual_codes`).

    Args:
        titles: I.
        encoder: "tfidf", or a folder or hub name of a sentence-transformers model.
        device: Of the latter: "cpu" or "gpu:N".
        levels: L.
        size: Codes of a level at most.
        seed: Of projection and clusters.

    Raises:
        UserError: The encoder cannot be loaded.
    """
    encoders = own_package("bridges", "retrieval.encoders")
    vectors = encoders.encode_titles(encoders.load_encoder(encoder, titles, device=device), titles)
    return residual_codes(_dense(vectors, seed), levels=levels, size=size, seed=seed)


def _dense(vectors: Any, seed: int) -> np.ndarray:
    """Vectors f32 [I, D] as they are; sparse ones of more than `WIDTH` dimensions projected."""
    if isinstance(vectors, np.ndarray):
        return vectors
    if min(vectors.shape) <= WIDTH:
        return np.asarray(vectors.toarray(), np.float32)
    from sklearn.decomposition import TruncatedSVD
    from sklearn.preprocessing import normalize
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        return np.asarray(normalize(TruncatedSVD(WIDTH, random_state=seed).fit_transform(vectors)), np.float32)


def make_parser() -> argparse.ArgumentParser:
    """What reads the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_jax.tasks.recommendation.ranking.semantic_ids",
        description="Writes semantic ids of a catalogue's items (residual quantisation of their titles' vectors), for "
        "task.writes: ids. The same seed writes the same file.",
    )
    parser.add_argument("--catalogue", required=True, metavar="FILE", help="The items: .tsv, .csv or .json.")
    parser.add_argument("--out", required=True, metavar="FILE", help="Where the ids go, a .tsv for task.semantic_ids.")
    parser.add_argument("--blank_titles", choices=("error", "keep"), default="error", help="Items without a title.")
    parser.add_argument(
        "--encoder", default="tfidf", help="tfidf, or a folder or name of sentence-transformers (default: %(default)s)."
    )
    parser.add_argument("--device", default="cpu", help="Of such a model: cpu or gpu:N (default: %(default)s).")
    parser.add_argument(
        "--levels", type=int, default=3, help="Words of an item before the last, which counts (default: %(default)s)."
    )
    parser.add_argument("--size", type=int, default=256, help="Words of a level at most (default: %(default)s).")
    parser.add_argument("--seed", type=int, default=0, help="Of the clusters (default: %(default)s).")
    parser.add_argument("--policy", metavar="FOLDER", help="A policy whose tokenizer gets the ids as new words.")
    parser.add_argument("--policy_out", metavar="FOLDER", help="Where that policy goes, for policy.path.")
    parser.add_argument("--version", action="version", version=version())
    parser.add_argument("--debug", action="store_true", help="Show tracebacks.")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return carry_out(make_parser, _write, arguments)


@extras_named()
def _write(options: argparse.Namespace) -> None:
    if not 1 <= options.levels <= MOST_LEVELS:
        raise UserError(f"--levels: expected a number from 1 to {MOST_LEVELS}, got {options.levels}")
    if options.size < 2:
        raise UserError(f"--size: expected a number >= 2, got {options.size}")
    if not 0 <= options.seed < 2**32 - options.levels:
        raise UserError(f"--seed: expected a number from 0 to 2^32, got {options.seed}")
    if bool(options.policy) != bool(options.policy_out):
        raise UserError("--policy and --policy_out: expected both or none")
    catalogue = read_catalogue(options.catalogue, blank_titles=options.blank_titles)
    made = {name: getattr(options, name) for name in ("levels", "size", "seed")}
    found = title_codes(catalogue.titles, encoder=options.encoder, device=options.device, **made)
    words = words_of(found.codes)
    write_ids(
        options.out,
        catalogue.ids,
        words,
        made=f"encoder {options.encoder}, " + ", ".join(f"{name} {value}" for name, value in made.items()),
    )
    print("\n".join(_summary(found, catalogue, options.out)))
    if options.policy:
        from grpo_jax.tasks.recommendation.ranking.new_words import add_words

        added = add_words(options.policy, words, catalogue.titles, options.policy_out)
        print(f"policy      {options.policy_out}: {added} new words, warm-started from the titles")


def _summary(found: Codes, catalogue: Catalogue, out: str) -> list[str]:
    *sizes, last = found.sizes
    return [
        f"ids         {out}: {len(catalogue)} items, {' × '.join(map(str, sizes))} words, and {last} to tell apart",
        f"shared      {found.shared:.1%} of the items have the first {len(sizes)} words of another",
        f"left        {', '.join(f'{share:.1%}' for share in found.left)} of the vectors, level by level",
    ]


def command() -> NoReturn:
    """`main` as a process of its own."""
    leave(main())


if __name__ == "__main__":
    command()
