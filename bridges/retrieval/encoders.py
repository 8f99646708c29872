"""Texts as unit vectors: TF-IDF, which needs no weights, or any sentence-transformers model.

A text's vector may depend, in its last bits, on the texts it is encoded with. Nothing is remembered between calls, and
every backend encodes the same batches: a resumed run sees the scores of an uninterrupted one.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from scipy import sparse

from bridges.retrieval.ranking import NonFiniteScores, Vectors
from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError

BATCH = 64
WORD = r"(?u)\b\w+\b"
"""A word of a title; by default scikit-learn drops those of one character."""


class Encoder(Protocol):
    """Turns texts into vectors; equal `identity` means equal vectors, wherever the encoder's files lie.

    `emphasis` f32 [E] is the factor of the sum of a history's vectors; None for encoders that have none.
    """

    identity: str
    emphasis: np.ndarray | None

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Encode one batch of texts as f32 [B, E], rows of length 1, or 0 where a text has no known content."""
        ...


class TfidfEncoder:
    """TF-IDF over the words of the titles, by scikit-learn: logarithmic counts, smoothed idf, unit length.

    A word is a run of letters and digits, even of one: "soap no 1" and "soap no 2" are different. A text whose words
    occur in no title is the zero vector. A history's words count by their idf once more: in a sum of many titles the
    common words would outweigh the rare ones.
    """

    def __init__(self, titles: Sequence[str]):
        """Fit words and idf; UserError if the titles hold no word (a letter or digit)."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        self._vectorizer = TfidfVectorizer(sublinear_tf=True, dtype=np.float32, token_pattern=WORD)
        try:
            self._vectorizer.fit(titles)
        except ValueError as error:
            raise UserError(f"encoder tfidf: the titles have no words ({error})") from error
        self.emphasis = np.asarray(self._vectorizer.idf_, np.float32)
        self.identity = f"tfidf-{digest([repr(sorted(self._vectorizer.get_params().items(), key=str))])}"

    def encode(self, texts: Sequence[str]) -> sparse.csr_matrix:
        """`Encoder.encode`, sparse, a column for each word."""
        return sparse.csr_matrix(self._vectorizer.transform(texts))


def _require_no_code(folder: Path) -> None:
    """Refuse a folder that names classes of its own: library versions differ in whether they would run them."""
    if not (folder / "modules.json").exists():
        return  # of transformers alone
    kinds = [str(module["type"]) for module in load_json(folder / "modules.json", list)]
    if custom := [kind for kind in kinds if not kind.startswith("sentence_transformers.")]:
        raise UserError(
            f"encoder {folder}: it comes with code of its own ({custom[0]}), which is not run; take another"
        )


class SentenceEncoder:
    """A sentence-transformers model; blank texts are the zero vector, which such a model would not give them."""

    emphasis = None

    def __init__(self, model: str, *, device: str = "cpu"):
        """Load "./folder", or "owner/name" from the hub, onto "cpu" or "gpu:N"; UserError if it cannot be loaded."""
        folder = Path(model).expanduser()
        if folder.is_dir() and not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
            raise UserError(f"encoder {model}: the folder holds neither modules.json nor config.json")
        from bridges.loading import first_line, local_folder, torch_device

        folder = local_folder(model)
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise UserError(f"encoder {model}: install sentence-transformers (grpo_jax[recommendation])") from error
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
        """`Encoder.encode`, dense."""
        vectors = np.zeros((len(texts), self._width), np.float32)
        nonempty = [row for row, text in enumerate(texts) if text.strip()]
        if nonempty:
            vectors[nonempty] = self._model.encode(
                [texts[row] for row in nonempty],
                batch_size=len(nonempty),
                convert_to_numpy=True,
                normalize_embeddings=True,
                show_progress_bar=False,
            )
        return vectors


def load_encoder(name: str, titles: Sequence[str], *, device: str = "cpu") -> Encoder:
    """Load "tfidf" over the catalogue's titles, or a sentence-transformers model: a folder, or "owner/name"."""
    return TfidfEncoder(titles) if name == "tfidf" else SentenceEncoder(name, device=device)


def encode_titles(encoder: Encoder, titles: Sequence[str]) -> Vectors:
    """Encode all titles, equal ones once; NonFiniteScores names the first whose vector is NaN or infinite."""
    texts = sorted(set(titles), key=lambda text: (len(text), text))  # a batch is padded to its longest
    parts = [encoder.encode(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
    vectors = np.concatenate(parts) if isinstance(parts[0], np.ndarray) else sparse.vstack(parts, format="csr")
    check_finite(vectors, texts)
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


def check_finite(vectors: Vectors, texts: Sequence[str]) -> None:
    """Raise NonFiniteScores naming the first text whose vector is not finite."""
    finite = np.isfinite(np.asarray(vectors.sum(1)).reshape(-1))
    if not finite.all():
        raise NonFiniteScores(f"the encoder's vector of {texts[int(np.argmin(finite))]!r} is not finite")


def _parts_of(model) -> Iterable[bytes | str]:
    """Contents of a sentence-transformers model, for its digest: modules, tokenizer, weights."""
    yield str(model)
    tokenizer = getattr(model, "tokenizer", None)
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "to_str"):
        yield json.dumps(json.loads(backend.to_str()) | {"truncation": None, "padding": None})
    for name, tensor in sorted(model.state_dict().items()):
        yield name
        yield tensor.detach().cpu().contiguous().float().numpy().tobytes()


def digest(parts: Iterable[bytes | str]) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of all parts."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:16]
