"""Judges in pools, in the config of a run."""

import pytest
import yaml
from support.pools import ODD, in_pool


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
