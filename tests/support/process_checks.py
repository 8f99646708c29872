"""One of several processes of tests/models/test_sharding.py: joins them, and compares an update over all their devices."""

import json
import sys

from grpo_jax.runs.processes import join_processes

count = join_processes()  # before the imports below touch a device

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from support.mesh_checks import updated  # noqa: E402

from grpo_jax.models.sharding import gather, make_mesh, shard_batch  # noqa: E402

mesh = make_mesh(2, 2, jax.devices())
numbers = shard_batch(np.arange(4.0, dtype=np.float32), mesh)
total = float(jax.jit(jnp.sum)(numbers))
alone, alone_report, _ = updated(None)
state, report, kept = updated(mesh)
whole = jax.tree.map(np.asarray, gather(state.variables, mesh))
pairs = zip(jax.tree.leaves(alone.variables), jax.tree.leaves(whole), strict=True)
found = {
    "processes": count,
    "devices": [jax.local_device_count(), jax.device_count()],
    "spread": any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(state.variables)),
    "total": total,
    "gradient": max(float(np.abs(np.asarray(a) - b).max()) for a, b in pairs),
    "loss": abs(report["loss"] - alone_report["loss"]),
    "kept": kept,
}
json.dump(found, sys.stdout)
