"""A policy over several devices gives the results of one device, and each device holds only its part."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import pytest
from jax.sharding import PartitionSpec as P
from support import tiny_update, xla
from support.imports import ROOT
from support.text_task import train_here

from grpo_jax.errors import UserError
from grpo_jax.models.architectures.gpt2 import GPT2Config
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.sharding import shardings
from grpo_jax.runs.processes import announced, join_processes

pytestmark = pytest.mark.slow
MESHES = ("8x1", "2x4")


def measured(*checks: str) -> dict:
    """Those of support/mesh_checks.py, in a process with eight devices."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, ROOT / "tests" / "support" / "mesh_checks.py", *checks]
    environment = os.environ | {"XLA_FLAGS": xla.devices(8), "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return measured("compare", "memory", "rows_of_products", "uneven")


@pytest.fixture(scope="module")
def more():
    """What other layers than a decoder's usual ones make of a mesh."""
    return measured("gemma", "gathered_tables", "tower")


def test_loss_and_gradient_are_those_of_one_device(found):
    compared = found["compare"]
    assert compared["loss"] < 1e-5 and compared["gradient"] < 1e-5
    assert compared["kept"]  # or the next update would compile again, and donated memory would not fit


@pytest.mark.parametrize("mesh", MESHES)
def test_each_device_holds_its_part_of_weights_and_optimizer(found, mesh):
    devices, whole = found["memory"][mesh], found["memory"]["whole"]
    assert len(set(devices)) == 1
    assert whole / 8 <= devices[0] < whole / 8 + 0.02 * whole  # norms and biases are on all of them


ALONG, ACROSS, TABLE = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp"), P(None, ("tensor", "fsdp"))
PLACES = [
    ("embed_tokens", tiny_update.CONFIG, P("tensor", "fsdp")),
    ("layers/q_proj/kernel", tiny_update.CONFIG, ALONG),
    ("layers/down_proj/kernel", tiny_update.CONFIG, ACROSS),
    ("layers/q_proj/bias", tiny_update.CONFIG, P()),
    ("layers/o_proj/a", tiny_update.CONFIG, P(None, "tensor")),
    ("embed_tokens", GPT2Config(50257, 64, 128, 2, 4, 32), TABLE),  # four do not divide 50257
    ("layers/gate_up_proj/kernel", replace(tiny_update.CONFIG, model_type="phi3", fused=True, qkv_bias=False), TABLE),
]


def test_what_lies_where_and_what_cannot():
    mesh = jax.sharding.AbstractMesh((2, 4), ("fsdp", "tensor"))
    for name, config, place in PLACES:
        lora = LoraConfig(4, 8.0, ("o_proj",)) if name.endswith("/a") else None
        tree = jax.eval_shape(partial(init_variables, config, lora=lora), jax.random.key(0))
        found = shardings(tree, mesh)["lora" if lora else "params"]
        for key in name.split("/"):
            found = found[key]
        assert found.spec == place, name
    odd = {"params": {"layers": {"q_proj": {"kernel": jax.ShapeDtypeStruct((2, 33, 32), "float32")}}}}
    with pytest.raises(ValueError, match=r"^params/layers/q_proj/kernel .* \[2, 33, 32\]: axis 1 does not divide"):
        shardings(odd, mesh)


@pytest.mark.wide
def test_norms_on_both_sides_are_trained_alike_over_several_devices(more):
    assert more["gemma"] < 1e-5


def test_a_device_computes_its_prompts_alone(found):
    """8 prompts over 4 parts, each 5 tokens and 3 completions of 5: not all prompts with a part of the width."""
    assert found["rows_of_products"] == [2 * (5 + 3 * 5)]


@pytest.mark.wide
def test_no_device_gathers_the_columns_of_the_embedding(more):
    assert more["gathered_tables"] == []


@pytest.mark.wide
def test_a_tower_sees_what_it_sees_on_one_device(more):
    assert more["tower"]["apart"] < 1e-5 and more["tower"]["drawn"] < 1e-5  # these lay on one device
    assert more["tower"]["rows"] == 8 // 2  # of eight prompts' pictures


def test_prompts_that_do_not_divide_are_sampled_alike(found):
    alone, together = found["uneven"]
    assert alone == together and len(alone) == 12


def test_too_few_devices_are_one_line(place, tmp_path, capsys):
    assert train_here(place.config, tmp_path / "run", "--policy.mesh.fsdp=2", "--policy.mesh.tensor=2") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: policy.mesh: fsdp 2 x tensor 2 takes 4 devices, but the policy has 1 (cpu:0")


JAXS = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}


def test_the_environment_tells_of_several_processes():
    assert announced({}) == (1, 0) and join_processes({}) == 1
    assert announced({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}) == (8, 3)
    assert announced({"SLURM_NTASKS": "8"}) == (1, 0)  # the batch script itself, outside srun
    assert announced(JAXS | {"SLURM_STEP_NUM_TASKS": "8"}) == (4, 1)
    for changed, message in [
        ({"JAX_PROCESS_ID": None}, "JAX_PROCESS_ID: expected all three, the first as HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "host"}, "expected all three, the first as HOST:PORT"),
        (
            {"JAX_NUM_PROCESSES": "x"},
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID: expected two numbers, .* got .'x', '1'",
        ),
        ({"JAX_PROCESS_ID": "4"}, r"expected two numbers, the second below the first, got \['4', '4'\]"),
    ]:
        environment = {name: value for name, value in (JAXS | changed).items() if value is not None}
        with pytest.raises(UserError, match=message):
            announced(environment)
