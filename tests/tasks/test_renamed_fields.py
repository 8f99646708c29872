"""A config of an earlier version is refused with what its fields are called now."""

import pytest

from grpo_jax.config import make_config
from grpo_jax.errors import UserError
from grpo_jax.train import main


@pytest.mark.parametrize(
    ("task", "values", "message"),
    [
        ("prompt_enhancement", {"renderer": {"steps": 2}}, "renderer is now judges.renderer"),
        (
            "prompt_enhancement",
            {"scorer": {"watch_model": "x"}},
            'scorer.watch_model is now .* "alignment@NAME" in watch',
        ),
        ("recommendation", {"recommendation": {"dummy_users": 9}}, "recommendation is now task"),
        ("recommendation", {"retrieval": {"ties": "average"}}, "retrieval is now task.retrieval"),
        ("recommendation", {"warm_start": {"pairs": "next"}}, "warm_start.pairs is now task.pairs"),
        (
            "recommendation",
            {"warm_start": {"title_characters": 9}},
            "warm_start.title_characters is now task.pair_characters",
        ),
    ],
)
def test_an_old_field_says_its_new_name(task, values, message):
    with pytest.raises(UserError, match=message):
        make_config(values, task=task)


def test_all_old_fields_of_a_file_are_said_in_one_line(tmp_path, capsys):
    (tmp_path / "old.yaml").write_text("task: prompt_enhancement\nrenderer: {steps: 2}\nscorer: {model: miniature}\n")
    assert main(["--config", str(tmp_path / "old.yaml")]) == 2
    error = capsys.readouterr().err
    assert "renderer is now judges.renderer; scorer is now judges.scorer" in error and error.count("\n") == 1
    assert main(["--renderer.steps", "2"]) == 2
    assert "renderer is now judges.renderer" in capsys.readouterr().err
