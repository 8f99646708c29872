"""The bundled miniature: policies, renderers and scorers of two worlds, small enough for two CPU cores."""

PARTS = ("policy", "policy_vl", "renderer", "scorer", "policy_scenes", "renderer_scenes", "scorer_scenes")
"""Folders of `bridges.bundled`: Qwen2, Qwen2-VL, SD 3, open_clip, and those of the harder world `scenes`."""
