"""Semantic ids of a catalogue: words by which a policy reads and writes items, alike for items that are alike.

On the command line:

    python -m grpo_jax.tasks.recommendation.semantic_ids --catalogue items.tsv --out ids.tsv
"""

from __future__ import annotations

import argparse
import string
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from scipy import sparse

from grpo_jax.config.named import own_package
from grpo_jax.errors import UserError, carry_out, extras_named, leave, one_line, version
from grpo_jax.models.hf.folder import load_tokenizer, resolve_folder
from grpo_jax.models.hf.weights import new_folder, refuse_foreign
from grpo_jax.tasks.recommendation.catalogue import Catalogue, Problems, plain, read_catalogue, read_table, read_text

if TYPE_CHECKING:
    import torch

MOST_LEVELS = len(string.ascii_lowercase) - 1
"""A letter for each level, and one for what tells the same codes apart."""


def words_of(codes: np.ndarray) -> tuple[str, ...]:
    """Return each item's words: codes [I, L] → "<a_12> <b_7> <c_201> <d_0>", a letter for each level.

    The marks around a word part it from the next where a tokenizer writes no space between its own words; a tokenizer
    of plain words reads "a_12".
    """
    letters = string.ascii_lowercase
    return tuple(
        " ".join(f"<{letter}_{code}>" for letter, code in zip(letters, row, strict=False)) for row in codes.tolist()
    )


def write_ids(path: str | Path, ids: Sequence[str], words: Sequence[str], *, made: str) -> None:
    """Write a line "id ⇥ words" for each of I items, below a header and a line that says how they were made."""
    if odd := [one for one in ids if not one.isprintable()]:
        raise UserError(f"item {odd[0]!r}: expected an id that can stand in a line of a .tsv")
    lines = [f"# {made}", "item_id\twords", *map("\t".join, zip(ids, words, strict=True))]
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def read_ids(path: str | Path, catalogue: Catalogue) -> tuple[str, ...]:
    """Read each item's words, in the catalogue's order, from a file of `write_ids` or one with a column "words"."""
    text = read_text(path, "what python -m grpo_jax.tasks.recommendation.semantic_ids writes")
    if text.startswith("#"):  # its line stays, blank, so that those below keep their numbers
        text = text[text.find("\n") :] if "\n" in text else ""
    problems = Problems(path)
    rows = list(read_table(text, ".tsv", problems, needs=("words",), columns={}))
    problems.check()
    words: dict[str, str] = {}
    owners: dict[str, str] = {}
    for line, row in rows:
        item, name = next(iter(row.values())).strip(), row["words"].strip()
        if item not in catalogue.rows:
            problems.add(line, f"item {item} is not in the catalogue")
        elif item in words:
            problems.add(line, f"item {item} occurs twice")
        elif not plain(name):
            problems.add(line, f"item {item} has no words")
        elif plain(name) in owners:
            problems.add(line, f"item {item} has the words of item {owners[plain(name)]}")
        else:
            words[item] = name
            owners[plain(name)] = item
    problems.check()
    if missing := [item for item in catalogue.ids if item not in words]:
        raise UserError(
            f"{path} lacks {len(missing)} of the catalogue's {len(catalogue)} items, the first is {missing[0]}: "
            "write it again from this catalogue"
        )
    return tuple(words[item] for item in catalogue.ids)


def add_words(folder: str | Path, names: Sequence[str], titles: Sequence[str], out: str | Path) -> int:
    """Write a policy's folder with the items' own words in its tokenizer, a token each; return how many are new.

    The row of a word, of the embedding and of the head alike, is the mean over its items of the mean over their
    title's tokens, so that a policy starts from what it knows of the words that the items have in common; without a
    title it is the mean of all rows. Words that the tokenizer has already keep their rows. `folder` is a Hugging Face
    folder or hub id of a model of text, `names` are the I items' words with spaces between them; `out` is replaced.
    """
    from transformers import AddedToken, AutoModelForCausalLM

    source, out = resolve_folder(folder), Path(out)
    if out.exists() and out.resolve() == source.resolve():
        raise UserError(f"--policy_out: expected another folder than the policy's, got {out}")
    refuse_foreign(out, "config.json", "a policy")
    tokenizer = load_tokenizer(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise UserError(f"--policy: cannot load {source}: {one_line(str(error), 200)}") from error
    title_tokens = [tokenizer(title, add_special_tokens=False)["input_ids"] for title in titles]
    vocabulary = tokenizer.get_vocab()
    items: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        for word in dict.fromkeys(name.split()):
            if word not in vocabulary:
                items.setdefault(word, []).append(row)
    if not items:
        raise UserError(f"--policy: the tokenizer of {folder} has these words already: give it as policy.path")
    tokenizer.add_tokens([AddedToken(word, lstrip=True, normalized=False) for word in items])
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size), mean_resizing=False)
    vocabulary = tokenizer.get_vocab()
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    tables: list[Any] = [layer.weight for layer in layers if layer is not None]  # to torch, tensors or modules
    for table in {id(table): table for table in tables}.values():  # one where they are tied
        _warm_start(table, [vocabulary[word] for word in items], list(items.values()), title_tokens)
    try:
        with new_folder(out) as work:
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
    except OSError as error:
        raise UserError(f"cannot write the policy to {out}: {error}") from error
    return len(items)


def _warm_start(
    table: torch.Tensor, places: list[int], items: Sequence[list[int]], title_tokens: Sequence[list[int]]
) -> None:
    """Write the rows of the new words into a table [V, D], in float32 on the way."""
    import torch

    with torch.no_grad():
        old = table[: min(places)].float().numpy()
        usual = old.mean(0)
        titles = np.stack([old[tokens].mean(0) if len(tokens) else usual for tokens in title_tokens])
        rows = np.stack([titles[of].mean(0) for of in items])
        table[places] = torch.from_numpy(rows).to(table.dtype)


class Codes(NamedTuple):
    """Codes of the items, int32 [I, L + 1], and how well they describe them.

    No two rows are alike; the last column is how many earlier items have the same L codes.

    Attributes:
        sizes: Codes in use of each of the L + 1 levels.
        shared: Share of the items whose L codes another item has too.
        left: Of each of the L levels, Σ‖what is left of a vector‖² / Σ‖vector‖² behind it.
    """

    codes: np.ndarray
    sizes: tuple[int, ...]
    shared: float
    left: tuple[float, ...]


def residual_codes(vectors: np.ndarray, *, levels: int, size: int, seed: int) -> Codes:
    """Quantise vectors level by level.

    With r₀ the vectors and c(r) the centre nearest to r among those that k-means finds for all of the level's r:
    code_l = index of c(r_l), r_{l+1} = r_l − c(r_l). A level has `size` codes at most, fewer where fewer vectors
    differ. One thread computes: the same seed gives the same codes.
    """
    rest = vectors.astype(np.float32)
    columns: list[np.ndarray] = []
    left: list[float] = []
    whole = max(float(np.square(rest, dtype=np.float64).sum()), 1e-30)
    for level in range(levels):
        labels, centres = _clusters(rest, size, seed + level)
        rest = rest - centres[labels]
        columns.append(labels)
        left.append(float(np.square(rest, dtype=np.float64).sum()) / whole)
    codes = np.stack(columns, axis=1)
    _, groups, counts = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    groups = groups.reshape(-1)
    order = np.argsort(groups, kind="stable")
    earlier = np.empty(len(codes), np.int64)  # items of the same codes that come before
    earlier[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    codes = np.column_stack([codes, earlier]).astype(np.int32)
    sizes = tuple(len(np.unique(column)) for column in codes.T)
    return Codes(codes, sizes, float((counts[groups] > 1).mean()), tuple(left))


def _clusters(vectors: np.ndarray, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cluster of each vector, int [I], and the clusters' centres, f32 [size, D]."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    different = len(np.unique(vectors.round(6), axis=0))
    with threadpool_limits(1), warnings.catch_warnings():
        # Of vectors that differ in their last bits alone.
        warnings.simplefilter("ignore", ConvergenceWarning)
        clusters = KMeans(min(size, different), random_state=seed).fit(vectors)
    return np.asarray(clusters.labels_), np.asarray(clusters.cluster_centers_, np.float32)


WIDTH = 128
"""Sparse vectors (TF-IDF) are projected to so many dimensions, those of their largest singular values; to unit length
again, or what is rare in titles would be near nothing and fall together."""


def title_codes(
    titles: Sequence[str], *, encoder: str = "tfidf", device: str = "cpu", levels: int, size: int, seed: int
) -> Codes:
    """Return codes of titles by their vectors (`residual_codes`).

    The encoder is "tfidf", or a folder or hub name of a sentence-transformers model on `device`, "cpu" or "gpu:N".
    """
    encoders = own_package("bridges", "retrieval.encoders")
    vectors = encoders.encode_titles(encoders.load_encoder(encoder, titles, device=device), titles)
    return residual_codes(_dense(vectors, seed), levels=levels, size=size, seed=seed)


def _dense(vectors: np.ndarray | sparse.csr_array, seed: int) -> np.ndarray:
    """Return vectors f32 [I, D] as they are; sparse ones of more than `WIDTH` dimensions projected."""
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
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_jax.tasks.recommendation.semantic_ids",
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
    """Run the command; return its exit code."""
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
    settings = {name: getattr(options, name) for name in ("levels", "size", "seed")}
    codes = title_codes(catalogue.titles, encoder=options.encoder, device=options.device, **settings)
    words = words_of(codes.codes)
    made = f"encoder {options.encoder}, " + ", ".join(f"{name} {value}" for name, value in settings.items())
    write_ids(options.out, catalogue.ids, words, made=made)
    *sizes, last = codes.sizes
    counts = f"{len(catalogue)} items, {' × '.join(map(str, sizes))} words, and {last} to tell apart"
    left = ", ".join(f"{share:.1%}" for share in codes.left)
    print(f"ids         {options.out}: {counts}")
    print(f"shared      {codes.shared:.1%} of the items have the first {len(sizes)} words of another")
    print(f"left        {left} of the vectors, level by level")
    if options.policy:
        added = add_words(options.policy, words, catalogue.titles, options.policy_out)
        print(f"policy      {options.policy_out}: {added} new words, warm-started from the titles")


def command() -> NoReturn:
    """Run `main` as a process of its own."""
    leave(main())


if __name__ == "__main__":
    command()
