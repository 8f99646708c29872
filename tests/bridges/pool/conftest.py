"""Judges in pools, by themselves and in the config of a run."""

from pathlib import Path

import pytest
import yaml
from support.pools import in_pool, load_in_pool

ODD = Path(__file__).with_name("odd_judges.py")


@pytest.fixture
def pool(cluster, tmp_path):
    """pool(**fields) loads the odd judge into actors, which end with the test."""
    made = []

    def make(**fields):
        made.append(load_in_pool(f"{ODD}:Odd", **{"folder": str(tmp_path), "replicas": 2, **fields}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def configured(place, tmp_path_factory):
    """configured(function, **fields) writes the config of `finished_run` with a judge in place of its first reward."""

    def write(function="letters", **fields):
        values = yaml.safe_load(place.config.read_text())
        values["judges"] = {"letters": in_pool("function", name=f"{ODD}:{function}", **fields)}
        values["rewards"][0] = {"name": "letters"}
        file = tmp_path_factory.mktemp("pooled") / "config.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    return write
