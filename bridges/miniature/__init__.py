"""The bundled miniature: two policies, a renderer and a scorer small enough to train and run on two CPU cores."""

from __future__ import annotations

from pathlib import Path

PARTS = ("policy", "policy_vl", "renderer", "scorer")


def path(part: str) -> Path:
    """Folder of "policy" (Qwen2), "policy_vl" (Qwen2-VL), "renderer" (Stable Diffusion 3) or "scorer" (open_clip)."""
    if part not in PARTS:
        raise ValueError(f"part must be one of {PARTS}, got {part!r}")
    return Path(__file__).parent / "weights" / part
