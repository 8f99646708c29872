"""Text in pictures, read by RapidOCR (PaddleOCR's PP-OCRv6 as ONNX files).

    pip install "rapidocr>=3.10" onnxruntime
    python -m grpo_jax.train --judges.text examples/judges/ocr.py:Ocr --rewards '["alignment", "text"]'

The package contains the weights.
"""

import re
from typing import Any

from grpo_jax import Judge

_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”|«([^»]+)»|「([^」]+)」|(?<!\w)\'([^\']+)\'(?!\w)|(?<!\w)‘([^’]+)’(?!\w)')


class Ocr(Judge):
    """Score a picture by the quoted text of its prompt; the judge's name is a reward."""

    threads: int = 1
    """Threads of RapidOCR."""

    def load(self, device: str = "cpu") -> "TextReader":
        """Load the models on the CPU."""
        from rapidocr import RapidOCR

        threads = {"EngineConfig.onnxruntime.intra_op_num_threads": self.threads}
        return TextReader(RapidOCR(params={**threads, "Global.log_level": "error"}))  # it warns of empty pictures


class TextReader:
    """Loaded models, and the reward for the quoted text."""

    def __str__(self) -> str:
        return "PP-OCRv6 of RapidOCR, on cpu"

    def __init__(self, engine: Any):
        self._engine = engine

    def read(self, images: Any) -> list[str]:
        """Return the text in pictures [B, 3, H, W] in [0, 1], its lines joined from top to bottom."""
        pixels = (images.detach().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        found = [self._engine(picture[:, :, ::-1]) for picture in pixels]  # it takes blue first
        return [" ".join(result.txts or ()) for result in found]

    def __call__(self, prompts: list, completions: list, *, images: Any, **columns: Any) -> list[float | None]:
        """Return the share of the quoted text in the picture, in [0, 1], as in Flow-GRPO (arXiv:2505.05470).

        That is 1 - (edits from the recognised to the quoted text) / (its length), at least 0. It is 1 if the recognised
        text contains the quoted one. Case and spaces do not count. None for a prompt without quotes.
        """
        asked = [quoted(prompt) for prompt in prompts]
        rows = [row for row, text in enumerate(asked) if text]
        read = iter(self.read(images[rows])) if rows else iter(())
        return [likeness(_bare(next(read)), _bare(text)) if text else None for text in asked]


def quoted(prompt: str) -> str:
    """Return the joined texts in quotes."""
    return " ".join("".join(groups) for groups in _QUOTED.findall(prompt))


def likeness(read: str, text: str) -> float:
    """Return 1 - (edits / length of the text), at least 0; 1 if the recognised text contains it."""
    return 1.0 if text in read else max(0.0, 1 - edits(read, text) / len(text))


def edits(first: str, second: str) -> int:
    """Return the insertions, deletions and replacements between two texts (Levenshtein)."""
    row = list(range(len(second) + 1))
    for place, character in enumerate(first, 1):
        before, row[0] = row[0], place
        for column, other in enumerate(second, 1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (character != other))
    return row[-1]


def _bare(text: str) -> str:
    return "".join(text.split()).casefold()
