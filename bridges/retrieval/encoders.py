"""Encode texts to unit vectors by TF-IDF or a sentence-transformers model; a folder caches those of a catalogue.

The last bits of a text's vector may depend on the other texts of its batch. Calls are stateless, and every backend
encodes the same batches, so a resumed run gets the scores of an uninterrupted one.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import sparse

from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError

Vectors = np.ndarray | sparse.csr_matrix

BATCH = 64
"""Texts encoded at once, by every backend: a text's last bits may depend on those beside it."""
_FORMAT = 2  # format of the folder, part of its name
WORD = r"(?u)\b\w+\b"
"""A word of a title; by default scikit-learn drops those of one character."""


class RetrievalError(RuntimeError):
    """A call gave no ranks: a timeout, a dead actor, a lost cluster, or NaN in vectors."""


class ServiceNotFound(RetrievalError, UserError):
    """There is no retrieval service; the message tells how to start one."""


class TfidfEncoder:
    """TF-IDF over the words of the titles, by scikit-learn: logarithmic counts, smoothed idf, unit length.

    A word is one or more letters and digits, so "soap no 1" and "soap no 2" differ. A text without known words is the
    zero vector. A history's words get a second idf factor, since common words would dominate a sum of many titles.
    """

    def __init__(self, titles: Sequence[str]):
        """Fit words and idf; UserError if the titles have no word (a letter or digit)."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        self._vectorizer = TfidfVectorizer(sublinear_tf=True, dtype=np.float32, token_pattern=WORD)
        try:
            self._vectorizer.fit(titles)
        except ValueError as error:
            raise UserError(f"encoder tfidf: the titles have no words ({error})") from error
        self.emphasis = np.asarray(self._vectorizer.idf_, np.float32)
        self.identity = f"tfidf-{digest([repr(sorted(self._vectorizer.get_params().items(), key=str))])}"

    def encode(self, texts: Sequence[str]) -> sparse.csr_matrix:
        """Encode texts as sparse f32 [B, words], rows of length 1, or 0 if a text has no known word."""
        return sparse.csr_matrix(self._vectorizer.transform(texts))


def _require_no_code(folder: Path) -> None:
    """Refuse a folder that names its own classes: some library versions would run them."""
    if not (folder / "modules.json").exists():
        return  # a plain transformers folder
    for kind in (str(module["type"]) for module in load_json(folder / "modules.json", list)):
        if not kind.startswith("sentence_transformers."):
            raise UserError(f"encoder {folder}: it comes with code of its own ({kind}), which is not run; take another")


class SentenceEncoder:
    """A sentence-transformers model, except that blank texts give the zero vector."""

    emphasis = None

    def __init__(self, model: str, *, device: str = "cpu"):
        """Load "./folder", or "owner/name" from the hub, onto "cpu" or "gpu:N"; UserError if it cannot be loaded."""
        from sentence_transformers import SentenceTransformer

        from bridges.loading import first_line, local_folder, torch_device

        folder = local_folder(model)
        if folder is not None:
            _require_no_code(folder)
        try:
            only = {"trust_remote_code": False, "model_kwargs": {"use_safetensors": True}}
            self._model = SentenceTransformer(str(folder or model), device=str(torch_device(device)), **only).eval()
        except Exception as error:
            raise UserError(f"cannot load the encoder {model}: {first_line(error)}") from error
        self._width = int(self._model.encode(["a"], show_progress_bar=False).shape[-1])
        self.identity = f"sentence-{digest(_parts_of(self._model))}"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Encode texts as f32 [B, width], rows of length 1, or 0 if a text is blank."""
        vectors = np.zeros((len(texts), self._width), np.float32)
        if nonempty := [row for row, text in enumerate(texts) if text.strip()]:
            vectors[nonempty] = self._model.encode(
                [texts[row] for row in nonempty],
                batch_size=len(nonempty),
                normalize_embeddings=True,
                show_progress_bar=False,
            )
        return vectors


Encoder = TfidfEncoder | SentenceEncoder
"""Turns texts into vectors; equal `identity` means equal vectors, wherever the encoder's files lie.

`emphasis` f32 [E] is the factor of the sum of a history's vectors, None without one.
"""


def load_encoder(name: str, titles: Sequence[str], *, device: str = "cpu") -> Encoder:
    """Load "tfidf" over the catalogue's titles, or a sentence-transformers model: a folder, or "owner/name"."""
    return TfidfEncoder(titles) if name == "tfidf" else SentenceEncoder(name, device=device)


def encode_titles(encoder: Encoder, titles: Sequence[str]) -> Vectors:
    """Encode all titles, equal ones once."""
    texts = sorted(set(titles), key=lambda text: (len(text), text))  # a batch is padded to its longest text
    parts = [encoder.encode(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
    vectors = np.concatenate(parts) if isinstance(parts[0], np.ndarray) else sparse.vstack(parts, format="csr")
    place = {text: row for row, text in enumerate(texts)}
    return vectors[[place[title] for title in titles]]


def directions(sums: Vectors) -> Vectors:
    """Normalise the rows to unit length; a row of zeros stays zero."""
    if sparse.issparse(sums):
        lengths = np.sqrt(np.asarray(sums.multiply(sums).sum(1), np.float32).reshape(-1))
        sums.eliminate_zeros()
        sums.data /= np.repeat(lengths, np.diff(sums.indptr))
        return sums
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.divide(sums, lengths, out=np.zeros_like(sums), where=lengths > 0)


def _parts_of(model) -> Iterable[bytes | str]:
    """Return a sentence-transformers model's contents for its digest: modules, tokenizer, weights."""
    yield str(model) + (model.prompts.get(model.default_prompt_name) or "")  # before every text
    tokenizer = getattr(model, "tokenizer", None)
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "to_str"):
        yield json.dumps(json.loads(backend.to_str()) | {"truncation": None, "padding": None})
    for name, tensor in sorted(model.state_dict().items()):
        yield name
        yield tensor.detach().cpu().contiguous().float().numpy().tobytes()


def digest(parts: Iterable[bytes | str]) -> str:
    """Return sixteen hexadecimal digits of the SHA-256 of all parts."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:16]


def catalogue_identity(titles: Sequence[str]) -> str:
    """Return the number of the titles and the digest of all, in their order."""
    return f"{len(titles)} titles, {digest(titles)}"


class Fingerprint(NamedTuple):
    """Digests of catalogue (titles in their order) and encoder; stored in checkpoints."""

    catalogue: str
    encoder: str


class Index(NamedTuple):
    """A catalogue's vectors f32 [N, E]: sparse for TF-IDF, else dense, memory-mapped from a folder."""

    vectors: Vectors
    fingerprint: Fingerprint
    folder: Path | None
    titles: Sequence[str] = ()  # as in the folder


def open_index(titles: Sequence[str], encoder: Encoder, cache: str | Path | None) -> Index:
    """Load the vectors of titles, in the order of their rows, from the cache, or make and cache them."""
    fingerprint = Fingerprint(catalogue_identity(titles), encoder.identity)
    if cache is None:
        return Index(encode_titles(encoder, titles), fingerprint, None)
    folder = Path(cache).expanduser() / f"{fingerprint.encoder}-{fingerprint.catalogue.split()[-1]}-{_FORMAT}"
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
        meta = load_json(folder / "meta.json")
        fingerprint, titles = Fingerprint(**meta["fingerprint"]), meta["titles"]
        vectors = np.load(dense, mmap_mode="r") if dense.is_file() else sparse.load_npz(folder / "vectors.npz")
    except Exception as error:  # zipfile and NumPy raise many types
        raise UserError(f"the cached catalogue {folder} cannot be read ({error}): delete it and start again") from error
    return Index(vectors, fingerprint, folder, titles)


def save_index(folder: Path, titles: Sequence[str], vectors: Vectors, fingerprint: Fingerprint) -> None:
    """Write an index folder atomically, under another name first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        save = sparse.save_npz if sparse.issparse(vectors) else np.save
        save(draft / "vectors", vectors)
        meta = {"fingerprint": fingerprint._asdict(), "titles": list(titles)}
        (draft / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        draft.chmod(0o755)
        with suppress(OSError):  # another process may be first, with the same content
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
