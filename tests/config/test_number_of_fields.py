"""A config has few fields: every one is a line that users read and a case that runs must hold."""

from support.imports import FILES

from grpo_jax.config.fields import ConfigField, Section
from grpo_jax.config.named import load_module

MOST = 220


def sections(kind=Section):
    """Every section of the packages: those of runs and CartPole, tasks, judges, pools, retrieval."""
    for inner in kind.__subclasses__():
        yield from (inner, *sections(inner))


def test_there_are_few_fields():
    """Each counts where it is defined, once; what holds a section counts by the section's fields."""
    for name in FILES:
        if name.startswith(("grpo_jax.config", "grpo_jax.tasks", "bridges.judges")):
            load_module(name)
    kinds = {kind for kind in sections() if kind.__module__ in FILES}
    own = [(kind, name) for kind in kinds for name in kind.__annotations__ if name in kind.model_fields]
    fields = [ConfigField("", kind, name, kind.model_fields[name], None) for kind, name in own]
    leaves = [field for field in fields if field.inner is None and field.marked is None]
    assert len(kinds) > 30 and len(leaves) <= MOST, len(leaves)
