"""Checkpoints: exact restore, complete at any moment, clear errors."""

import resource
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.errors import UserError
from grpo_jax.runs import checkpoint as module
from grpo_jax.runs.checkpoint import Checkpoints, find_damage
from grpo_jax.runs.policy import restore_variables
from grpo_jax.training.state import free_buffers


class Adaptive(NamedTuple):
    coefficient: float
    seen: int


@partial(jax.jit, static_argnums=1)
def trained(seed, width):
    key = jax.random.key(seed)
    params = {"w": jax.random.normal(key, (4, width)), "frozen": jax.random.normal(key, (2,)).astype(jnp.bfloat16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    _, opt_state = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    return params, opt_state


def make_state(seed=0, width=3):
    params, opt_state = trained(seed, width)
    return {
        "variables": {"params": params},
        "optimizer": opt_state,
        "reference": None,
        "empty": {},
        "adaptive": Adaptive(0.1 + seed, 3),
        "order": np.arange(5) * seed,
        "best": np.float32(seed / 3),
        "done": False,
        "list": [jnp.int32(seed), (jnp.ones(2),)],
    }


def assert_same(came, expected):
    assert jax.tree.structure(came) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(came), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        if isinstance(b, bool | int | float):
            assert type(a) is type(b), name
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), name


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


def test_restores_every_bit_and_every_type(folder):
    state = make_state(3)
    meta = {"position": np.int64(12), "baseline": {"score": jnp.float32(0.25)}, "best": float("-inf")}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(5, state, meta)
    with Checkpoints(folder) as checkpoints:
        came, came_meta = checkpoints.restore("latest", make_state(4))
    assert_same(came, state)
    assert came_meta == {"position": 12, "baseline": {"score": 0.25}, "best": float("-inf"), "step": 5}


def test_a_state_that_changes_after_save_is_saved_as_it_was(folder):
    advance = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    params, order = {"w": jnp.zeros((512, 512)), "b": jnp.zeros(1000)}, np.zeros(100_000)
    with Checkpoints(folder, keep=20) as checkpoints:
        for step in range(8):
            checkpoints.save(step, {"variables": params, "order": order}, {})
            before, params = params, advance(advance(params))
            free_buffers(before)  # as an update does where JAX did not
            order += 2
        for step in range(8):
            came, _ = checkpoints.restore(step, {"variables": params, "order": order})
            assert all((np.asarray(leaf) == 2 * step).all() for leaf in jax.tree.leaves(came)), step


def test_a_final_checkpoint_of_a_run_that_has_gone_on_is_named(folder, capsys):
    """One that was made longer, and has not come to its end."""
    variables = {"params": {"w": jnp.ones(2)}}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save_as("final", 1, {"variables": variables}, {})
    assert restore_variables(variables, folder.parent, "final", {})[1]["step"] == 1 and not capsys.readouterr().err
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(2, {"variables": variables}, {})
    for name in ("final", "latest"):
        restore_variables(variables, folder.parent, name, {})
    line = "warning: checkpoint final is of step 1, and the run has gone on to step 2: --checkpoint latest\n"
    assert capsys.readouterr().err == line


def test_a_name_is_a_link_and_its_step_is_kept(folder):
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save_as("best", 20, make_state(2), {"score": 0.2})
        for step in (30, 40):
            checkpoints.save(step, make_state(step), {})
        checkpoints.wait()
        assert checkpoints.available() == ["20", "40", "best"]
        came, meta = checkpoints.restore("best", make_state())
        assert meta == {"score": 0.2, "step": 20}
        assert_same(came, make_state(2))
        checkpoints.save_as("best", 50, make_state(3), {})
        checkpoints.save_as("final", 50, make_state(3), {})
        assert checkpoints.latest_step() == 50
        assert (folder / "best").resolve() == (folder / "final").resolve() == folder / "step_50"
        checkpoints.save(60, make_state(4), {}, wait=True)
        assert checkpoints.available() == ["50", "60", "best", "final"]
    with Checkpoints(folder, read_only=True) as checkpoints:
        variables = {"variables": make_state(3)["variables"]}
        assert_same(checkpoints.restore("final", variables)[0], variables)


def test_a_copy_that_followed_the_links_is_read_and_continued(folder, tmp_path):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save_as("best", 1, make_state(1), {"at": 1})
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert not (copy / "best").is_symlink()
    with Checkpoints(copy) as checkpoints:
        assert_same(checkpoints.restore("best", make_state())[0], make_state(1))
        checkpoints.save_as("best", 2, make_state(2), {})
        assert (copy / "best").resolve() == copy / "step_2"


def test_saving_a_step_again_replaces_its_metadata_alone(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(5, make_state(1), {"validated": False})
        checkpoints.save_as("best", 5, make_state(2), {"validated": True})
        for which in (5, "best"):
            came, meta = checkpoints.restore(which, make_state())
            assert meta == {"validated": True, "step": 5}
            assert_same(came, make_state(1))


def test_evaluation_leaves_a_write_in_progress_alone(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, make_state(1), {})
    writing = folder / "step_2.orbax-checkpoint-tmp"
    writing.mkdir(parents=True)
    (writing / "part").write_text("half")
    with Checkpoints(folder, read_only=True) as checkpoints:
        checkpoints.restore("latest", make_state())
    assert (writing / "part").exists()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest_step() == 1
    assert not writing.exists()


def test_arrays_return_to_the_devices_of_the_template(folder):
    device = jax.devices()[-1]
    free, bound = jnp.ones(3), jax.device_put(jnp.ones(3), device)
    state = {"variables": {"free": free, "bound": bound}}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {})
        came = checkpoints.restore(1, state)[0]["variables"]
    assert came["bound"].sharding == bound.sharding and came["bound"].committed
    assert not came["free"].committed  # else it could not follow arrays of another device


def test_another_configuration_is_named_by_its_first_leaf(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, make_state(), {})
        for change, message in (
            ({"variables": make_state(width=5)["variables"]}, r"params\.w is float32\[4, 3\].*\[4, 5\] is exp"),
            ({"variables": {"params": {}}}, r"variables\.params\.frozen is bfloat16\[2\].*absent is expected"),
            ({"extra": jnp.ones(1)}, r"extra is absent in the checkpoint, float32\[1\] is expected"),
            ({"optimizer": optax.sgd(1.0).init({})}, r"optimizer\.1\.0\.count is int32\[\]"),
        ):
            with pytest.raises(UserError, match=message):
                checkpoints.restore(1, make_state() | change)


def test_a_missing_checkpoint_lists_the_available_ones(folder, tmp_path):
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(UserError, match=r"no checkpoint 'latest' in .*: the run has not come to its first"):
            checkpoints.restore("latest", make_state())
        checkpoints.save(4, make_state(), {})
        for name in ("best", 7, "04", "9" * 5000):
            with pytest.raises(UserError, match=r"no checkpoint '.* in .*: there are: 4$") as error:
                checkpoints.read_meta(name)
            assert len(str(error.value)) < 400
        for name in ("newest", "²", "-1", "1.0", ""):
            with pytest.raises(UserError, match="expected a step, latest, best, final or start"):
                checkpoints.read_meta(name)
    with pytest.raises(UserError, match="no such folder"):
        Checkpoints(tmp_path / "nowhere", read_only=True)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Two steps and a final one, and what they hold."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), {"at": step})
        checkpoints.save_as("best", 1, make_state(1), {"at": 1})
    return folder


def flip(path):
    """Changes one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = (flip, lambda path: path.write_bytes(b""), lambda path: path.unlink())


def test_any_damage_to_a_checkpoint_is_found_and_the_previous_is_used(sound, tmp_path):
    checkpoint = sound / "step_2"
    files = sorted(path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    for number, name in enumerate(files):
        folder, notes = shutil.copytree(sound, tmp_path / str(number), symlinks=True), []
        DAMAGES[number % 3](folder / "step_2" / name)
        with Checkpoints(folder, warning=notes.append) as checkpoints:
            if name.name in ("_CHECKPOINT_METADATA", "commit_success.txt"):  # written at the commit, and not needed
                assert_same(checkpoints.restore("latest", make_state())[0], make_state(2))
                checkpoints.save(3, make_state(3), {}, wait=True)
                continue
            with pytest.raises(UserError, match=r"step_2 is damaged \(.*\); there are: 1, best"):
                checkpoints.restore(2, make_state())
            assert checkpoints.read_meta("latest")["at"] == 1, name
            (line,) = notes
            assert "step_2 is damaged (" in line and line.endswith("was set aside as damaged_step_2"), line
            assert checkpoints.available() == ["1", "best"]
            if number < 2:  # its place is free
                checkpoints.save(2, make_state(2), {"at": 2}, wait=True)
                assert checkpoints.read_meta("latest")["at"] == 2


def test_a_damaged_best_checkpoint_is_set_aside(sound, tmp_path):
    folder, notes = shutil.copytree(sound, tmp_path / "best", symlinks=True), []
    flip(max((path for path in (folder / "step_1").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))
    with Checkpoints(folder, warning=notes.append) as checkpoints:
        assert checkpoints.latest_step() == 2 and checkpoints.available() == ["2"]
    assert len(notes) == 1 and "step_1 is damaged (" in notes[0]


def test_a_checkpoint_under_another_number_or_half_there_is_damaged(sound, tmp_path):
    folder, notes = shutil.copytree(sound, tmp_path / "copied", symlinks=True), []
    shutil.copytree(folder / "step_2", folder / "step_13")
    shutil.copytree(folder / "step_2", folder / "step_012")  # no name that a run gives
    shutil.copytree(folder / "step_2", folder / "step_3")
    (folder / "step_3" / "checkpoint.json").write_text("[" * 100_000)
    (folder / "step_4").mkdir()
    with Checkpoints(folder, warning=notes.append) as checkpoints:
        with pytest.raises(UserError, match=r"step_13 is damaged \(it was saved as step 2\); there"):
            checkpoints.restore(13, make_state())
        assert checkpoints.latest_step() == 2
        assert [line.partition("/step_")[2].partition(" ")[0] for line in notes] == ["13", "4", "3"]
        assert checkpoints.available() == ["1", "2", "best"]


def test_if_every_checkpoint_is_damaged_none_is_moved(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "all", symlinks=True)
    for step in (1, 2):
        flip(folder / f"step_{step}" / "checkpoint.json")
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(
            UserError, match=r"every checkpoint in .* is damaged \(step_2: checkpoint.json is missing or"
        ):
            checkpoints.latest_step()
        assert sorted(path.name for path in folder.iterdir()) == ["best", "step_1", "step_2"]


def test_a_reader_takes_the_newer_checkpoint_if_a_run_removes_the_older(folder, monkeypatch):
    with Checkpoints(folder, keep=1) as writing, Checkpoints(folder, read_only=True) as reading:
        writing.save_as("best", 1, make_state(1), {})

        def overtaken(path):
            monkeypatch.undo()
            for step in (2, 3):
                writing.save_as("best", step, make_state(step), {})
            assert not path.exists()
            return find_damage(path)

        monkeypatch.setattr(module, "find_damage", overtaken)
        came, meta = reading.restore("best", make_state())
        assert meta["step"] == 3
        assert_same(came, make_state(3))


@contextmanager
def small_files_only(limit):
    """Every write beyond `limit` bytes of a file fails, as on a full disk, root or not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failing_disk_keeps_what_was_committed_and_can_be_fixed(folder):
    big = {"variables": {"w": jax.random.normal(jax.random.key(0), (100_000,))}}
    with (
        small_files_only(50_000),
        pytest.raises(UserError, match=r"cannot write .*checkpoints \(File too large\): make room"),
        Checkpoints(folder) as checkpoints,
    ):
        checkpoints.save(1, make_state(), {}, wait=True)
        checkpoints.save(2, big, {}, wait=True)
    assert not list(folder.glob("*tmp*"))  # gives the space back
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest_step() == 1
        assert_same(checkpoints.restore("latest", make_state())[0], make_state())
        checkpoints.save(2, big, {}, wait=True)
        assert_same(checkpoints.restore(2, big)[0], big)


def test_remains_of_a_failed_write_are_removed_while_a_thread_still_writes(folder):
    big = {"variables": {"w": jax.random.normal(jax.random.key(0), (100_000,))}}
    with small_files_only(50_000), pytest.raises(UserError, match="cannot write"), Checkpoints(folder) as checkpoints:
        try:
            checkpoints.save(1, big, {}, wait=True)
        finally:  # as by a writer of Orbax that learns of the failure late
            (folder / "step_1.orbax-checkpoint-tmp" / "training").mkdir(parents=True)
    assert not list(folder.iterdir())


def test_a_failed_background_write_is_repaired_by_the_next(folder):
    big = {"variables": {"w": jax.random.normal(jax.random.key(0), (100_000,))}}
    notes = []
    with Checkpoints(folder, warning=notes.append) as checkpoints:
        with small_files_only(50_000):
            checkpoints.save(1, big, {})
            for thread in [thread for thread in threading.enumerate() if thread.name == "save_finalize"]:
                threading.Thread.join(thread)  # Orbax's own raises
        checkpoints.save(2, big, {})
        assert checkpoints.available() == ["2"] and len(notes) == 1
        assert "could not be written" in notes[0]


def test_a_deleted_folder_is_reported_at_once(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, make_state(), {}, wait=True)
        shutil.rmtree(folder.parent)
        with pytest.raises(UserError, match=r"run is gone: it was deleted under the run"):
            checkpoints.save(2, make_state(), {}, wait=True)
    assert not folder.exists()
