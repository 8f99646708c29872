"""Judges in pools, as a config has them."""

from support.imports import ROOT

from bridges.ray_pool import placed
from grpo_jax.config.judge import PoolSection
from grpo_jax.config.run import make_config

ODD = ROOT / "tests" / "bridges" / "pool" / "odd_judges.py"


def in_pool(kind, **fields):
    """The values of a judge, those of its pool among them."""
    pool = {name: fields.pop(name) for name in [*fields] if name in PoolSection.model_fields}
    return {"kind": kind, **fields, "pool": pool}


def load_in_pool(kind, **fields):
    """The judge, loaded into its actors."""
    judge = make_config(task="text", judges={"odd": in_pool(kind, **fields)}).judges["odd"]
    return placed(judge, "judges.odd").load("cpu")
