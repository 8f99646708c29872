"""The GPU benchmark without a GPU: all its parts have measurements."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(HERE / "gpu"), str(HERE), *sys.path])
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if str(HERE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_part_has_measurements(scripts):
    for part in scripts("driver").PARTS.values():
        assert scripts(part.module).measurements(True, *part.arguments)
