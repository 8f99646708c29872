"""Checkpoints of one step are on the disk once, and each is whole without the others."""

import errno
import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from support.text_task import finished_run

from grpo_jax.errors import UserError
from grpo_jax.runs import checkpoint as module
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.series import Series, disk_usage

SIZE = 100_000  # bytes of the arrays of a state


def state_of(step):
    weights = np.random.default_rng(step).random(SIZE // 8)  # which compress little
    return {"variables": {"w": jnp.asarray(weights, jnp.float32)}, "optimizer": {"m": jnp.asarray(-weights)}}


def found_in(checkpoints, which):
    state, meta = checkpoints.restore(which, state_of(0))
    return float(state["variables"]["w"][0]), float(state["optimizer"]["m"][0]), meta


def wanted(step, **meta):
    state = state_of(step)
    return float(state["variables"]["w"][0]), float(state["optimizer"]["m"][0]), {**meta, "step": step}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


SAVED = {
    "best first": lambda at: (at.save_best(3, state_of(3), {"as": "best"}), at.save(3, state_of(3), {"as": "step"})),
    "step first": lambda at: (at.save(3, state_of(3), {"as": "step"}), at.save_best(3, state_of(3), {"as": "best"})),
}


@pytest.mark.parametrize("order", SAVED)
def test_best_final_and_step_share_their_arrays_and_no_meta(order, folder, tmp_path):
    with Checkpoints(folder) as checkpoints:
        SAVED[order](checkpoints)
        checkpoints.save_final(3, state_of(3), {"as": "final"})
    assert 0.8 * SIZE < disk_usage([folder]) < 1.5 * SIZE
    copy = shutil.copytree(folder, tmp_path / "elsewhere")  # as cp and rsync do: three whole ones
    assert disk_usage([copy]) > 2.5 * SIZE
    for place in (folder, copy):
        with Checkpoints(place, read_only=True) as checkpoints:
            assert found_in(checkpoints, 3) == wanted(3, **{"as": "step"})
            assert found_in(checkpoints, "best") == wanted(3, **{"as": "best"})
        for gone in ("step_3", "best"):
            shutil.rmtree(place / gone)
        with Checkpoints(place, read_only=True) as checkpoints:
            assert found_in(checkpoints, "latest") == wanted(3, **{"as": "final"})


def test_a_best_step_stays_where_its_step_goes(folder):
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save_best(1, state_of(1), {})
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step), {})
        checkpoints.wait()
        assert checkpoints.available() == ["3", "best"]
        with Checkpoints(folder, read_only=True) as other:
            assert found_in(other, "best") == wanted(1)
        checkpoints.save_best(3, state_of(3), {})
        assert disk_usage([folder]) < 1.5 * SIZE  # what was best before is gone


@pytest.mark.parametrize("links", [0, 2])
def test_without_hard_links_each_is_a_copy(links, folder, monkeypatch):
    link, made = os.link, []

    def refused(*names):
        made.append(names)
        if len(made) > links:
            raise OSError(errno.EPERM, "Operation not permitted")
        return link(*names)

    monkeypatch.setattr(os, "link", refused)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, state_of(3), {"as": "step"})
        checkpoints.save_final(3, state_of(3), {"as": "final"})
        assert len(made) == links + 1
    with Checkpoints(folder) as checkpoints:
        assert disk_usage([folder]) > 1.5 * SIZE
        assert found_in(checkpoints, 3) == wanted(3, **{"as": "step"})
        assert found_in(checkpoints, "final") == wanted(3, **{"as": "final"})


@pytest.mark.parametrize("moment", ["link", "rename"])
def test_what_ends_the_process_on_the_way_leaves_the_step_and_no_half(moment, folder, monkeypatch):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, state_of(3), {}, wait=True)
        calls, call = [], getattr(os, moment)

        def ends(*names):
            calls.append(names)
            if moment == "rename" or len(calls) == 2:
                raise KeyboardInterrupt
            return call(*names)

        monkeypatch.setattr(os, moment, ends)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save_final(3, state_of(3), {})
        monkeypatch.undo()
    assert list((folder / "final" / ".writing").iterdir())
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.available() == ["3"] and found_in(checkpoints, 3) == wanted(3)
        assert disk_usage([folder]) < 1.5 * SIZE


def test_a_process_shares_what_it_goes_on_from_and_nothing_that_another_one_left(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, state_of(3), {}, wait=True)
        checkpoints.save(4, state_of(4), {})
    with Checkpoints(folder) as checkpoints:
        checkpoints.restore("latest", state_of(0))
        checkpoints.save_final(4, state_of(4), {})
        assert disk_usage([folder]) < 2.5 * SIZE
    with Checkpoints(folder) as checkpoints:
        checkpoints.restore(3, state_of(0))
        checkpoints.save_final(4, state_of(5), {})  # learned otherwise since
        assert found_in(checkpoints, "final")[:2] == wanted(5)[:2]
        assert found_in(checkpoints, 4) == wanted(4)


def test_a_file_that_is_gone_or_lies_elsewhere_is_not_shared(folder):
    for name in ("gone", "../../config.yaml"):
        shutil.rmtree(folder, ignore_errors=True)
        (folder.parent / "config.yaml").parent.mkdir(exist_ok=True)
        (folder.parent / "config.yaml").write_text("task: text")
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(3, state_of(3), {}, wait=True)
            manifest = folder / "step_3" / "manifest.json"
            listed = json.loads(manifest.read_text())
            listed["files"][name] = {"bytes": 10, "sha256": "0"}
            manifest.write_text(json.dumps(listed))
            checkpoints.save_final(3, state_of(3), {})
            assert found_in(checkpoints, "final") == wanted(3)  # written in full
        assert disk_usage([folder]) > 1.5 * SIZE


def test_the_oldest_go_beyond_the_bytes_that_may_be_kept(folder):
    with Checkpoints(folder, keep=9, keep_bytes=3.5 * SIZE) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, state_of(step), {}, wait=True)
        assert checkpoints.available() == ["3", "4", "5"]
        checkpoints.save_best(5, state_of(5), {})  # which takes nothing
        assert checkpoints.available() == ["3", "4", "5", "best"]
        checkpoints.save(6, state_of(6), {}, wait=True)
        checkpoints.save_final(7, state_of(7), {})
        assert checkpoints.available() == ["5", "6", "best", "final"]  # of three states
    with Checkpoints(folder, keep=9, keep_bytes=1) as checkpoints:
        checkpoints.save(8, state_of(8), {}, wait=True)
        assert checkpoints.available() == ["8", "best", "final"]  # never these


def test_what_a_run_removes_while_it_is_read_is_named(folder, monkeypatch):
    with Checkpoints(folder, keep=1) as writing, Checkpoints(folder, read_only=True) as checkpoints:
        writing.save(1, state_of(1), {}, wait=True)
        writing.save_best(1, state_of(1), {})
        read = Series.read

        def overtaken(series, number, item, target):
            monkeypatch.setattr(Series, "read", read)
            step = (writing.latest_step() or 0) + 1
            writing.save(step, state_of(step), {}, wait=True)
            writing.save_best(step, state_of(step), {})
            return read(series, number, item, target)

        monkeypatch.setattr(Series, "read", overtaken)
        with pytest.raises(UserError, match=r"no checkpoint '1' in .*: there are: 2, best$"):
            checkpoints.restore(1, state_of(0))


SAVING = {
    "step": lambda at, step: at.save(step, state_of(step), {}, wait=True),
    "best": lambda at, step: at.save_best(step, state_of(step), {}),
    "final": lambda at, step: at.save_final(step, state_of(step), {}),
}
READING = {
    "restore": lambda at, which: at.restore(which, state_of(0))[1]["step"],
    "variables": lambda at, which: at.restore_variables(which)[1]["step"],
    "meta": lambda at, which: at.read_meta(which)["step"],
    "latest step": lambda at, which: at.latest_step() or at.read_meta(which)["step"],
}
READS = [(module, "find_damage"), *((Series, name) for name in ("described", "read", "read_meta"))]


@pytest.mark.parametrize(("saved", "reading"), list(zip([*SAVING, "step"], READING, strict=True)))
def test_a_reader_takes_the_newer_one_wherever_a_run_removes_its_own(saved, reading, folder, monkeypatch):
    which, newest = "best" if saved == "best" else "latest", 1
    with Checkpoints(folder, keep=1) as writing, Checkpoints(folder, read_only=True) as beside:
        SAVING[saved](writing, newest)
        for owner, name in READS:
            with monkeypatch.context() as patch:

                def overtaken(*arguments, patch=patch, whole=getattr(owner, name)):
                    nonlocal newest
                    patch.undo()
                    newest += 1
                    SAVING[saved](writing, newest)
                    return whole(*arguments)

                patch.setattr(owner, name, overtaken)
                assert READING[reading](beside, which) == newest, name
    assert newest > 1


def test_a_run_takes_the_room_of_its_states(place):
    """Steps 3 and 6 are kept, 6 is final, and what is best has a step of its own or is one of them."""
    at = finished_run(place) / "checkpoints"
    with Checkpoints(at, read_only=True) as checkpoints:
        steps = {checkpoints.read_meta(name)["step"] for name in checkpoints.available()}
        assert checkpoints.available() == ["3", "6", "best", "final"]
    one = disk_usage([at / "step_6"])
    assert disk_usage([at]) < (len(steps) + 0.5) * one
