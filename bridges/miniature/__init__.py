"""The bundled miniature: policies, renderers and scorers of two worlds, small enough for two CPU cores."""

PARTS = (
    *("policy", "policy_vl", "renderer", "scorer", "policy_scenes", "renderer_scenes", "scorer_scenes"),
    "renderer_erring",
)
"""Folders of `bridges.bundled`: Qwen2, Qwen2-VL, SD 3, open_clip, those of the harder world `scenes`, and a renderer
that draws its numbers and colours wrong by chance."""
