"""The catalogue's vectors: made once, kept in a folder named by their fingerprint."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import sparse

from bridges.retrieval.encoders import Encoder, Vectors, encode_titles, titles_digest
from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError

_FORMAT = 1  # of the folder; part of its name


class Fingerprint(NamedTuple):
    """Digests of catalogue (titles in their order) and encoder. `_asdict()` is stored in checkpoints."""

    catalogue: str
    encoder: str


class Index(NamedTuple):
    """A catalogue as vectors f32 [N, E], a memory map where it comes from a folder; sparse for TF-IDF."""

    vectors: Vectors
    fingerprint: Fingerprint
    folder: Path | None


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/grpo_jax/retrieval`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpo_jax" / "retrieval"


def open_index(titles: Sequence[str], encoder: Encoder, cache: str | Path | None) -> Index:
    """Load the vectors of titles, in the order of their rows, from the cache, or make and store them there."""
    if not len(titles):
        raise UserError("the catalogue has no items")
    digest = titles_digest(titles)
    fingerprint = Fingerprint(f"{len(titles)} titles, {digest}", encoder.identity)
    if cache is None:
        return Index(encode_titles(encoder, titles), fingerprint, None)
    folder = Path(cache).expanduser() / f"{fingerprint.encoder}-{digest}-{_FORMAT}"
    try:
        if not (folder / "meta.json").is_file():
            _save(folder, titles, encode_titles(encoder, titles), fingerprint)
        return load_index(folder)
    except OSError as error:
        raise UserError(f"the cache of the retrieval cannot be used: {error}") from error


def load_index(folder: str | Path) -> Index:
    """Load a folder's vectors as memory maps: only the rows that are used are read; UserError if it is damaged."""
    folder = Path(folder)
    try:
        meta = load_json(folder / "meta.json")
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in meta["arrays"]}
        vectors = arrays.get("vectors")
        if vectors is None:
            parts = (arrays["data"], arrays["indices"], arrays["indptr"])
            vectors = sparse.csr_matrix(parts, shape=tuple(meta["shape"]), copy=False)
        return Index(vectors, Fingerprint(**meta["fingerprint"]), folder)
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(f"the cached catalogue {folder} cannot be read ({error}): delete it and start again") from error


def load_titles(folder: str | Path) -> list[str]:
    """Titles of a folder's vectors."""
    return load_json(Path(folder) / "titles.json", list)


def _save(folder: Path, titles: Sequence[str], vectors: Vectors, fingerprint: Fingerprint) -> None:
    """Write under another name first, so that the folder is there whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        names = ("data", "indices", "indptr") if sparse.issparse(vectors) else ("vectors",)
        for name in names:
            np.save(draft / f"{name}.npy", vectors if name == "vectors" else getattr(vectors, name))
        (draft / "titles.json").write_text(json.dumps(list(titles)), encoding="utf-8")
        meta = {"arrays": names, "shape": list(vectors.shape), "fingerprint": fingerprint._asdict()}
        (draft / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / "meta.json").is_file():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
