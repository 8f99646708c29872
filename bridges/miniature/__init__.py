"""The bundled miniature: policies, renderers and scorers of two worlds, small enough for two CPU cores."""

from __future__ import annotations

from pathlib import Path

PARTS = ("policy", "policy_vl", "renderer", "scorer", "policy_scenes", "renderer_scenes", "scorer_scenes")


def path(part: str) -> Path:
    """Return the folder of "policy" (Qwen2), "policy_vl" (Qwen2-VL), "renderer" (SD 3) or "scorer" (open_clip).

    The harder world, `scenes`, has "policy_scenes", "renderer_scenes" and "scorer_scenes".
    """
    return Path(__file__).parent / "weights" / part
