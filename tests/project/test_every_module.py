"""Whatever is imported anywhere is there: modules that no other test loads, imports inside functions, scripts."""

import pytest
from support import import_checks


@pytest.mark.filterwarnings("ignore")  # of other people's packages, when they are imported
def test_every_import_leads_somewhere():
    dangling = [line for path in import_checks.sources() for line in import_checks.dangling(path)]
    assert not [*import_checks.import_failures(), *dangling]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from grpo_jax.training.update import make_updates", "grpo_jax.training.update has no make_updates"),
        ("def later():\n    from bridges.miniature import train_painter", "bridges.miniature has no train_painter"),
        ("import grpo_jax.loop", "no module grpo_jax.loop"),
        ("from grpo_jax.core import losses\nlosses.no_loss()", "losses has no no_loss"),
        ("from support.text_task import nothing", "support.text_task has no nothing"),
        ("import beside\nbeside.other()", "beside has no other"),
        ("from grpo_jax.core import losses\nlosses.grpo_loss\nimport beside\nbeside.there", None),
    ],
)
def test_the_reader_sees_what_is_not_there(source, found, tmp_path):
    (tmp_path / "beside.py").write_text("there = 1\n")
    (tmp_path / "script.py").write_text(source)
    lines = list(import_checks.dangling(tmp_path / "script.py"))
    assert (found in lines[0] and len(lines) == 1) if found else not lines
