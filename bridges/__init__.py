"""The PyTorch side: renderers, scorers and their helpers, retrieval, and dlpack exchange of arrays.

Another distribution installs a top-level package of this name. Commands therefore check for `__grpo_jax__` first, and
report the imported path if it is missing. Importing this package imports neither torch nor jax; its modules do.
"""

import os
from pathlib import Path

__grpo_jax__ = True


def bundled(name: str, part: str) -> Path | None:
    """Return the folder of bundled weights, such as ("miniature", "policy"); None if there are none.

    The rest of the name after its first "_" selects among several parts: ("miniature_vl", "policy") is policy_vl.
    """
    world, _, variant = name.partition("_")
    folder = Path(__file__).parent / world / "weights" / (f"{part}_{variant}" if variant else part)
    return folder if name.isidentifier() and os.path.isdir(folder) else None  # for any string, even a long one
