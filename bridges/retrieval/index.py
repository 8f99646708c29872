"""The catalogue's vectors: made once, kept in a folder named by their fingerprint."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import sparse

from bridges.retrieval.encoders import Encoder, digest, encode_titles
from bridges.retrieval.ranking import Vectors
from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError

_FORMAT = 2  # of the folder; part of its name


class Fingerprint(NamedTuple):
    """Digests of catalogue (titles in their order) and encoder; stored in checkpoints."""

    catalogue: str
    encoder: str


class Index(NamedTuple):
    """A catalogue as vectors f32 [N, E]: sparse for TF-IDF, dense ones of a folder as a memory map."""

    vectors: Vectors
    fingerprint: Fingerprint
    folder: Path | None


def default_cache() -> Path:
    """Return `$XDG_CACHE_HOME/grpo_jax/retrieval`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpo_jax" / "retrieval"


def open_index(titles: Sequence[str], encoder: Encoder, cache: str | Path | None) -> Index:
    """Load the vectors of titles, in the order of their rows, from the cache, or make and store them there."""
    own = digest(titles)
    fingerprint = Fingerprint(f"{len(titles)} titles, {own}", encoder.identity)
    if cache is None:
        return Index(encode_titles(encoder, titles), fingerprint, None)
    folder = Path(cache).expanduser() / f"{fingerprint.encoder}-{own}-{_FORMAT}"
    try:
        if not folder.is_dir():
            save_index(folder, titles, encode_titles(encoder, titles), fingerprint)
        return load_index(folder)
    except OSError as error:
        raise UserError(f"the cache of the retrieval cannot be used: {error}") from error


def load_index(folder: str | Path) -> Index:
    """Load a folder's vectors; UserError if it is damaged."""
    folder = Path(folder)
    dense = folder / "vectors.npy"
    try:
        fingerprint = Fingerprint(**load_json(folder / "meta.json")["fingerprint"])
        vectors = np.load(dense, mmap_mode="r") if dense.is_file() else sparse.load_npz(folder / "vectors.npz")
    except Exception as error:  # zipfile and NumPy have many
        raise UserError(f"the cached catalogue {folder} cannot be read ({error}): delete it and start again") from error
    return Index(vectors, fingerprint, folder)


def load_titles(folder: str | Path) -> list[str]:
    """Return the titles of a folder's vectors."""
    return load_json(Path(folder) / "meta.json")["titles"]


def save_index(folder: Path, titles: Sequence[str], vectors: Vectors, fingerprint: Fingerprint) -> None:
    """Write under another name first, so that the folder is there whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        save = sparse.save_npz if sparse.issparse(vectors) else np.save
        save(draft / "vectors", vectors)
        meta = {"fingerprint": fingerprint._asdict(), "titles": list(titles)}
        (draft / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        draft.chmod(0o755)
        with suppress(OSError):  # another process was first, with the same content
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
