"""The miniature can be built again, part by part."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("open_clip")
pytest.importorskip("diffusers")

from bridges import bundled  # noqa: E402
from scripts.miniature import build  # noqa: E402


@pytest.fixture
def one_thread():
    """More would wait for each other on busy cores, for minutes."""
    before = torch.get_num_threads()
    yield ["--threads", "1"]
    torch.set_num_threads(before)


def test_a_part_from_the_command(one_thread, tmp_path, capsys):
    assert build.main(["policy_vl", "--out", str(tmp_path), "--steps", "1", *one_thread]) == 0
    assert "policy_vl 1/1 loss" in capsys.readouterr().out.replace(" tower ", " ")
    assert files(tmp_path / "policy_vl") == files(bundled("miniature", "policy_vl"))


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policy", "--steps", "2"], "--steps is for trials"),
        (["check", "--prompts", "2", "--out", str(build.WEIGHTS)], "--prompts is for trials"),
        (["all", "--steps", "0", "--out", "x"], "--steps: expected at least 1, got 0"),
        (
            ["check", "--out", "nowhere"],
            "nowhere has no policy and no policy_vl and no renderer and no scorer and no policy_scenes and "
            "no renderer_scenes and no scorer_scenes and no renderer_erring: build it there first",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert build.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
