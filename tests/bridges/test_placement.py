"""Placement of policy and judges on any number of cards, and JAX's settings before it starts."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

torch = pytest.importorskip("torch")

from bridges import placement  # noqa: E402
from bridges.placement import (  # noqa: E402
    memory_shares,
    place,
    prepare_jax,
    resolve,
    share_memory,
)
from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.runs.loading import ask_for_determinism  # noqa: E402

PARTS = ("policy", "renderer", "scorer")


def asked(*where: str, **named: str) -> dict[str, str]:
    """Requests for the three parts: by place, by name, and "auto" for the others."""
    return dict.fromkeys(PARTS, "auto") | dict(zip(PARTS, where, strict=False)) | named


def given(requests, gpus, **able):
    """The devices of the parts, in their order."""
    placement, _ = resolve(requests, gpus, **able)
    assert list(placement) == list(requests)
    return tuple(placement.values())


@pytest.mark.parametrize(
    ("gpus", "expected", "note"),
    [
        (0, ("cpu", "cpu", "cpu"), "policy on cpu, renderer on cpu, scorer on cpu (no GPU found)"),
        (1, ("gpu:0", "gpu:0", "gpu:0"), "policy on gpu:0, renderer on gpu:0, scorer on gpu:0 (1 GPU found)"),
        (2, ("gpu:0", "gpu:1", "gpu:1"), "policy on gpu:0, renderer on gpu:1, scorer on gpu:1 (2 GPUs found)"),
        (8, ("gpu:0", "gpu:1", "gpu:2"), None),
    ],
)
def test_default_places(gpus, expected, note):
    assert resolve(asked(), gpus) == (asked(*expected), [note] if note else [])


@pytest.mark.parametrize(
    ("request_", "gpus", "expected"),
    [
        (asked(policy="gpu:1"), 3, ("gpu:1", "gpu:0", "gpu:2")),  # the named card is not taken twice
        (asked(renderer="gpu:0"), 3, ("gpu:1", "gpu:0", "gpu:2")),
        (asked(scorer="cpu"), 2, ("gpu:0", "gpu:1", "cpu")),
        (asked(policy="cpu"), 1, ("cpu", "gpu:0", "gpu:0")),
        (asked(policy="gpu:0,gpu:1"), 4, ("gpu:0,gpu:1", "gpu:2", "gpu:3")),
        (asked("cuda:0", "gpu", "cuda"), 1, ("gpu:0", "gpu:0", "gpu:0")),
    ],
)
def test_named_devices(request_, gpus, expected):
    assert given(request_, gpus) == expected


def test_every_judge_has_a_place_and_a_policy_may_have_none_beside_it():
    """Any number of judges: each its own card while there are any, then those with the fewest parts."""
    judges = {"policy": "auto", "renderer": "auto", "scorer": "auto", "second": "auto", "third": "auto"}
    assert given(judges, 5) == ("gpu:0", "gpu:1", "gpu:2", "gpu:3", "gpu:4")
    assert given(judges, 3) == ("gpu:0", "gpu:1", "gpu:2", "gpu:1", "gpu:2")
    assert given(judges | {"third": "cpu"}, 4) == ("gpu:0", "gpu:1", "gpu:2", "gpu:3", "cpu")
    assert given({"policy": "auto"}, 2) == ("gpu:0",)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asked(renderer="gpu:5"), r"devices\.renderer: there is no gpu:5 .* has cpu, gpu:0, gpu:1$"),
        *((asked(scorer=value), r"devices\.scorer: expected") for value in ("gpu:x", "tpu:0", "", "gpu:0,gpu:1")),
    ],
)
def test_devices_that_are_not_there_or_misspelt(request_, message):
    with pytest.raises(UserError, match=message):
        resolve(request_, 2)


def test_library_without_gpu_support():
    placement, notes = resolve(asked(), 2, jax_gpus=False)
    assert placement == asked("cpu", "gpu:1", "gpu:0")
    assert len(notes) == 1 and "jax cannot use GPUs" in notes[0]
    assert given(asked(), 2, torch_gpus=False) == ("gpu:0", "cpu", "cpu")
    with pytest.raises(UserError, match="installed jax cannot use gpu:0"):
        resolve(asked(policy="gpu:0"), 1, jax_gpus=False)


@pytest.mark.parametrize(
    ("needed", "shares"),
    [
        (None, (0.46, 0.46)),
        (1, (0.72, 0.2)),
        (16, (0.62, 0.3)),
        (50, (0.25, 0.67)),
        (60, (0.16, 0.76)),
        (79, (0.1, 0.82)),
    ],
)
def test_judges_on_the_policys_card_get_what_they_say_and_the_policy_the_rest(needed, shares):
    assert memory_shares(needed, 80) == shares


def test_a_shared_card_has_a_share_for_each_and_a_line(monkeypatch):
    given = {}
    monkeypatch.setattr(placement, "jax_has_started", lambda: False)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda card: SimpleNamespace(total_memory=80))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda share, card: given.update({card: share}))
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "0")  # back afterwards: the function sets it
        monkeypatch.delenv(name)
    assert share_memory(asked("gpu:0", "gpu:1", "cpu"), 16) == [] and not given
    assert share_memory(asked("gpu:0", "gpu:0", "gpu:1"), 16) == [
        "memory of gpu:0: at most 62% for the policy and 30% for judges, taken as needed"
    ]
    assert given == {0: 0.3} and os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.62"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the user's own
    assert "50% for the policy and 42% for judges" in share_memory(asked("gpu:0", "gpu:0", "gpu:0"), 16)[0]


def test_started_backend_is_left_alone_and_said():
    jax.devices()
    assert prepare_jax(asked("cpu", "cpu", "cpu")) == []
    (note,) = prepare_jax(asked("gpu:7", "cpu", "cpu"))
    assert "already started" in note


def test_a_mesh_takes_the_first_cards(monkeypatch):
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("bridges.placement._jax_has_gpus", lambda: True)
    assert place(asked(), policy_count=2)[0] == asked("gpu:0,gpu:1", "gpu:2", "gpu:3")
    assert place(asked("gpu:3"), policy_count=2)[0]["policy"] == "gpu:3"
    with pytest.raises(
        UserError, match=r"devices\.policy: there is no gpu:0,gpu:1,.* here; this machine has cpu, gpu:0"
    ):
        place(asked(), policy_count=5)


PREPARE = """
import os, jax
from bridges.placement import prepare_jax, jax_has_started
for where, preallocate in {cases}:
    os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    os.environ |= preallocate
    assert prepare_jax(dict(zip(("policy", "renderer", "scorer"), where))) == []
    assert not jax_has_started()
    print(jax.config.read("jax_cuda_visible_devices"), os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))
"""


def test_jax_is_shown_the_policys_cards_only():
    """In a process that has not started JAX; memory is claimed as it is needed where torch shares a card."""
    cases = [
        (("gpu:2", "gpu:0", "gpu:1"), {}),
        (("gpu:0,gpu:1", "gpu:2", "gpu:1"), {}),
        (("gpu:0", "gpu:0", "cpu"), {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    code = PREPARE.format(cases=cases)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 None", "0,1 false", "0 true"], done.stderr


def test_a_process_whose_jax_has_started_on_a_gpu_is_not_deterministic(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "--a")
    ask_for_determinism(torch_too=False)  # a CPU run always is
    assert os.environ["XLA_FLAGS"] == "--a --xla_gpu_deterministic_ops=true"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    ask_for_determinism(torch_too=False)  # as asked for before
    monkeypatch.setenv("XLA_FLAGS", "--a")
    with pytest.raises(UserError, match="deterministic: expected false in a process whose JAX has started"):
        ask_for_determinism(torch_too=False)
