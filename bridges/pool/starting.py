"""Starting the actors of a pool, and checking that the cluster has room for them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridges.pool import actor, cluster
from bridges.pool.section import PoolSection
from grpo_jax.errors import UserError

_log = logging.getLogger(__name__)

_RAYS = {"num_cpus": "CPU", "num_gpus": "GPU"}
"""Ray's second names of resources."""


def start_actors(pool: str, judges: Sequence[Any], section: PoolSection, names: Sequence[str] = ()) -> list[Any]:
    """Start an actor for each judge, which it loads, and return their handles; `pool` is its name for errors.

    `names` are those under which any process of the cluster finds the actors; none where nobody looks for them.
    """
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(actor)  # an interpreter of the judge's own need not have this package
    try:
        settings = {
            "folder": os.getcwd(),
            "check": bool(section.runtime_env or section.address),
            "deterministic": _deterministic(),
        }
        given = _given(section)
        known = {name: given.pop(name) for name in ("num_cpus", "num_gpus", "memory") if name in given}
        remote = ray.remote(actor.JudgeActor)
        options = {
            **known,
            "resources": given or None,
            "runtime_env": section.runtime_env or None,
            "max_restarts": section.max_restarts,
            "max_task_retries": 0,
        }
        device = "gpu:0" if section.cards else "cpu"
        called = [{"name": name, "namespace": cluster.NAMESPACE} for name in names] or [{}] * len(judges)
        return [
            remote.options(**options, **name).remote(_packed(judge), device, settings)
            for judge, name in zip(judges, called, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise UserError(f"{pool}.resources, runtime_env: {cluster.first_line(error)}") from error
    finally:
        cloudpickle.unregister_pickle_by_value(actor)


def require_room(pool: str, section: PoolSection) -> None:
    """Raise UserError if a cluster that does not grow lacks a resource that the actors need in all."""
    import ray

    there = ray.cluster_resources()
    where = f"the Ray cluster at {section.address}" if section.address else "this machine's cluster"
    for name, amount in _given(section).items():
        wanted, has = section.replicas * amount, there.get(_RAYS.get(name, name), 0.0)
        if wanted <= has:
            continue
        lack = f"{pool}.resources.{name}: {section.replicas} actors need {wanted:g}, {where} has {has:g}"
        if section.address is None or not cluster.grows():
            raise UserError(lack)
        _log.warning("%s; it is waited for until the cluster has grown", lack)


def _given(section: PoolSection) -> dict[str, float]:
    """Resources of each actor."""
    return {"num_cpus": 1.0 if section.address else 0.0, "num_gpus": 0.0, **section.resources}


def _packed(judge: Any) -> bytes:
    """Pickle a judge, with the code of its file where no import finds that."""
    from ray import cloudpickle

    module = sys.modules.get(type(judge).__module__)
    file = Path(getattr(module, "__file__", None) or "")
    own = module is not None and file.stem not in ("", "__init__", module.__name__.rpartition(".")[2])
    if not own:
        return cloudpickle.dumps(judge)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(judge)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _deterministic() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.are_deterministic_algorithms_enabled()
