"""Judges in pools, in the config of a run."""

from pathlib import Path

import pytest
import yaml
from support.pools import in_pool

ODD = Path(__file__).with_name("odd_judges.py")


@pytest.fixture(scope="module")
def configured(place, tmp_path_factory):
    """configured(function, **fields) writes the config of `finished_run` with a judge in place of its first reward."""

    def write(function="letters", **fields):
        values = yaml.safe_load(place.config.read_text())
        name = function if ":" in function else f"{ODD}:{function}"
        values["judges"] = {"letters": in_pool("function", name=name, **fields)}
        values["rewards"][0] = {"name": "letters"}
        file = tmp_path_factory.mktemp("pooled") / "config.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    return write
