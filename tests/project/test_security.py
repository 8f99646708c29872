"""The claims of docs/security.md about untrusted files: nothing in them is executed."""

import ast
import pickle

import jax.numpy as jnp
import numpy as np
from support.imports import FILES, ROOT

from grpo_jax.runs.checkpoint import Checkpoints

UNPICKLERS = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
TO_ACTORS = {"bridges/ray_pool.py"}
"""Messages between a run and its Ray cluster, which has a token."""
OF_USERS = ("grpo_jax/config/named.py", "exec(compile(code, str(path), 'exec', dont_inherit=True), vars(module))")
"""The call that imports a Python file which the user names, as `import` would."""
SOURCES = [*FILES.values(), *sorted((ROOT / "examples").rglob("*.py"))]


def test_no_module_reads_pickles_or_runs_what_it_read():
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            wrong = any(name.partition(".")[0] in UNPICKLERS for name in names)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                wrong = called in ("eval", "exec", "torch.load", "yaml.unsafe_load", "yaml.full_load")
                wrong |= called == "yaml.load" and "SafeLoader" not in ast.unparse(node)
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                wrong |= given.get("allow_pickle", "False") != "False"
                wrong |= given.get("trust_remote_code", "False") != "False"
                wrong |= given.get("weights_only", "True") != "True"
            place = str(path.relative_to(ROOT))
            if wrong and place not in TO_ACTORS and (place, ast.unparse(node)) != OF_USERS:
                found.append(f"{path.relative_to(ROOT)}: {ast.unparse(node)[:80]}")
    assert not found, "\n" + "\n".join(found)


def test_a_checkpoint_is_read_without_unpickling(tmp_path, monkeypatch):
    state = {"variables": {"w": jnp.arange(4.0)}, "optimizer": {"count": np.int32(3)}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"progress": {}}, wait=True)

    def refuse(*_, **__):
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(1, state)
    np.testing.assert_array_equal(restored["variables"]["w"], np.arange(4.0))
