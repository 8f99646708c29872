"""One Ray cluster on this machine for the tests of a module."""

import os
from pathlib import Path

import pytest
import yaml

os.environ.setdefault("RAY_AUTH_MODE", "token")  # before Ray is imported

ODD = Path(__file__).with_name("odd_judges.py")


@pytest.fixture(scope="module")
def cluster():
    """This process belongs to it; the pools of a run that is made here join it and leave it running."""
    pytest.importorskip("ray")
    from bridges.pool import cluster

    cluster.enter(None)
    yield cluster
    cluster.leave()


@pytest.fixture
def pool(cluster, tmp_path):
    """pool(**fields) loads the odd judge into actors, which end with the test."""
    from grpo_jax.config import make_config

    made = []

    def make(**fields):
        judge = {"kind": f"{ODD}:Odd", "folder": str(tmp_path), "replicas": 2, **fields}
        made.append(make_config(task="text", judges={"odd": judge}).judges["odd"].load("cpu"))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def configured(place, tmp_path_factory):
    """configured(function, **fields) writes the config of `finished_run` with a judge in place of its first reward."""

    def write(function="letters", **fields):
        values = yaml.safe_load(place.config.read_text())
        values["judges"] = {"letters": {"kind": "function", "name": f"{ODD}:{function}", **fields}}
        values["rewards"][0] = {"name": "letters"}
        file = tmp_path_factory.mktemp("pooled") / "config.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    return write
