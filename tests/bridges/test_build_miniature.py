"""The miniature can be built again: every part trains, and what was trained is measured where it lies."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("open_clip")
pytest.importorskip("diffusers")

from bridges import miniature  # noqa: E402
from scripts.miniature import build  # noqa: E402


@pytest.fixture
def one_thread():
    """More would wait for each other on busy cores, for minutes."""
    before = torch.get_num_threads()
    yield ["--threads", "1"]
    torch.set_num_threads(before)


@pytest.mark.parametrize("part", ["policy", "policy_vl"])
def test_a_part_from_the_command(part, one_thread, tmp_path, capsys):
    assert build.main([part, "--out", str(tmp_path), "--steps", "1", *one_thread]) == 0
    assert f"{part} 1/1 loss" in capsys.readouterr().out.replace(" tower ", " ")
    assert files(tmp_path / part) == files(miniature.path(part))


@pytest.mark.slow
@pytest.mark.wide
def test_all_parts_from_the_command(one_thread, tmp_path, capsys):
    before = times(build.WEIGHTS)
    trial = ["--out", str(tmp_path), "--steps", "1", "--prompts", "4"]
    assert build.main(["all", *trial, *one_thread]) == 1  # built, and not valid
    told = capsys.readouterr().out
    begins = [
        told.index(words)
        for words in ("policy 1/1 loss", "policy_vl tower", "renderer:", "scorer:", '"checker_on_true_pictures"')
    ]
    assert begins == sorted(begins)  # the cheapest first
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures == json.loads(told[told.index("\n{") :])
    assert figures["test_prompts"] == 4
    expected = {"checker >= 0.99": True, "oracle >= 0.85": False, "start <= 0.40": True}
    assert {name: figures["valid"][name] for name in expected} == expected and len(figures["valid"]) == 8
    assert {path.name for path in tmp_path.iterdir()} == {*miniature.PARTS, "figures.json"}
    for part in miniature.PARTS:  # the form of the package's own
        assert files(tmp_path / part) == files(miniature.path(part))
    assert times(build.WEIGHTS) == before  # nothing was written into the package


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def times(folder):
    return {name: (folder / name).stat().st_mtime_ns for name in files(folder)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policy", "--steps", "2"], "--steps is for trials"),
        (["check", "--prompts", "2"], "--prompts is for trials"),
        (["check", "--prompts", "2", "--out", str(build.WEIGHTS)], "--prompts is for trials"),
        (["all", "--steps", "0", "--out", "x"], "--steps: expected at least 1, got 0"),
        (
            ["check", "--out", "nowhere"],
            "nowhere has no policy and no policy_vl and no renderer and no scorer and no policy_scenes and "
            "no renderer_scenes and no scorer_scenes: build it there first",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert build.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
