"""--plan: its figures equal those of a run's arrays and programs; its text and exit codes."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from support.folders import load_folder
from support.imports import ROOT
from support.tiny_decoders import QWEN2_FIELDS

from grpo_jax.config.command_line import parse
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.hf import folder as hf
from grpo_jax.models.lora import count_weights, quantise
from grpo_jax.models.policy import Policy
from grpo_jax.models.vision.tower import tower_shapes
from grpo_jax.planning import GIB
from grpo_jax.planning import memory as plan
from grpo_jax.planning.memory import PolicyMemory, held_memory, published_policies, read_shape
from grpo_jax.planning.programs import (
    Report,
    Work,
    batch_shapes,
    report_program,
    run_programs,
    state_shapes,
    tree_bytes,
)
from grpo_jax.sampling.sampler import SamplingParams, make_sampler
from grpo_jax.train import main
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import init_state, make_optimizer, make_schedule
from grpo_jax.training.update import make_configured_step

SMALL = (
    *("--training.prompts_per_batch=4", "--sampling.group_size=3", "--sampling.max_new_tokens=6"),
    *("--data.max_prompt_tokens=16", "--training.grad_accumulation_steps=2", "--training.inner_epochs=1"),
)


@pytest.fixture
def folder(tmp_path):
    """A policy's config.json and nothing else."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(QWEN2_FIELDS))
    return tmp_path / "policy"


def configured(*arguments):
    return parse(["--config=prompt_enhancement_miniature", *SMALL, *arguments])


def of_tiny(*arguments):
    config = configured(*arguments)
    return config, hf.model_config(Path("tiny"), QWEN2_FIELDS)


def held(config, model):
    return held_memory(config, state_shapes(config, model, None))


def shapes_of(model):
    return jax.eval_shape(partial(init_variables, model), jax.random.key(0))


def test_what_is_held_is_what_a_run_holds():
    from bridges import bundled

    config = configured()
    model = read_shape("miniature")
    memory = held(config, model)
    loaded = load_folder(bundled("miniature", "policy"))
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, 10))
    state = init_state({"params": loaded.params}, optimizer, keep_reference=True)
    assert memory.parameters == sum(leaf.size for leaf in jax.tree.leaves(loaded.params)) == memory.trained
    assert memory.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(state.variables))
    assert memory.optimizer == sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    assert memory.reference == sum(leaf.nbytes for leaf in jax.tree.leaves(state.reference)) > 0


def test_adapters_alone_are_trained_and_the_base_is_the_reference():
    config, model = of_tiny("--policy.lora.rank=4", "--policy.lora.targets=[q_proj]", "--policy.frozen_dtype=bfloat16")
    memory = held(config, model)
    base = shapes_of(model)["params"]
    adapters = 2 * (32 * 4 + 4 * 32)
    assert memory.trained == adapters and memory.reference == 0
    assert memory.weights == 2 * count_weights(base) + 4 * adapters
    assert memory.optimizer == pytest.approx(8 * adapters, abs=16)  # and the counts of updates


def test_a_base_in_few_bits_is_counted_as_it_is_stored():
    from bridges import bundled

    model = read_shape("miniature")
    adapters = ("--policy.lora.rank=2", "--policy.frozen_dtype=float32")
    whole = held(configured(*adapters), model)
    config = configured(*adapters, "--policy.quantised=int4")
    memory = held(config, model)
    loaded = load_folder(bundled("miniature", "policy")).params
    saved = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded)) - tree_bytes(quantise(loaded, "int4"))
    assert memory.parameters == whole.parameters and memory.trained == whole.trained
    assert memory.weights == whole.weights - saved and saved > 0
    assert plan.policy_lines(config, memory)[0].note == "int4, adapters of rank 2 float32"


def recorded(monkeypatch, make):
    """Return the functions that `make()` passes to jax.jit, jitted with its options."""
    made, jit = [], jax.jit
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", lambda *given, **options: made.append(jit(*given, **options)) or made[-1])
        make()
    return made[-1]


@pytest.fixture(scope="module")
def programs():
    """A run's config, its model, and the programs that are planned for it."""
    config, model = of_tiny("--algorithm.kl_coef=0.1", "--sampling.top_k=5")
    return config, model, run_programs(config, model, None, None)


def test_update_takes_what_the_program_of_a_run_takes(programs, monkeypatch):
    config, model, planned = programs
    planned = report_program(planned["update"], None, jax.devices()[0])
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, 100))
    policy = Policy(model, remat=config.policy.remat)
    forward = make_forward(policy, temperature=config.sampling.temperature)

    def make():
        make_configured_step(forward, optimizer, config.algorithm, config.training, max_new_tokens=6)

    begin = partial(init_state, optimizer=optimizer, keep_reference=True)
    state = jax.eval_shape(begin, shapes_of(model))
    batch = batch_shapes(config, policy, state)
    program = recorded(monkeypatch, make).lower(state._replace(reference=None), {}, batch).compile()
    taken = program.memory_analysis().temp_size_in_bytes
    assert planned.temporary_bytes == pytest.approx(taken, rel=0.02)


def test_a_batchs_preparation_is_planned_as_it_is_run():
    """The optimal token baseline reads the sum of all squared probabilities, a second product with the head."""
    config, model = of_tiny("--algorithm.advantage=optimal_token_baseline", "--algorithm.preset=bnpo")
    program = run_programs(config, model, None, None)["logprobs"]
    read = jax.eval_shape(program.function, *program.arguments)
    assert read.sum_pi_squared.shape == read.logprobs.shape == (4, 3, 6)


def test_sampling_takes_what_the_program_of_a_run_takes(programs, monkeypatch):
    _, model, planned = programs
    planned = report_program(planned["sample"], None, jax.devices()[0])
    params = SamplingParams(3, 6, top_k=5)
    sampler = {}

    def make():
        sampler["jit"] = make_sampler(Policy(model), params, eos_ids=(0,), pad_id=0)

    program = recorded(monkeypatch, make)
    tokens, keys = np.zeros((4, 16), np.int32), jax.random.split(jax.random.key(0), 4)
    compiled = program.lower(
        (None, None), shapes_of(model), tokens, np.ones_like(tokens, bool), keys, np.ones(4, bool), None
    ).compile()
    taken = compiled.memory_analysis().temp_size_in_bytes
    assert planned.temporary_bytes == pytest.approx(taken, rel=0.05)


def test_a_mesh_shares_out_what_is_held():
    config, model = of_tiny()
    whole = held(config, model)
    mesh = jax.sharding.AbstractMesh((2, 1), ("fsdp", "tensor"))
    half = tree_bytes(state_shapes(config, model, mesh).variables)
    small = tree_bytes(shapes_of(model)["params"]["norm"])
    assert whole.weights / 2 < half < whole.weights / 2 + 12 * small  # norms and biases are everywhere


def test_a_plan_compiles_the_last_turn_too(monkeypatch):
    words = ("--task.environment=mine.py:step", "--sampling.turns=2", "--sampling.max_observation_tokens=11")
    config, asked = parse(["--task=text", *SMALL, *words, "--rewards=mine.py:reward"]), []
    monkeypatch.setattr(plan, "report_program", lambda *_: asked.append(1) or Report(0, GIB * len(asked), 0, Work()))
    memory, programs = plan.plan_policy(config, hf.model_config(Path("tiny"), QWEN2_FIELDS))
    assert "turn" in programs and len(asked) == len(programs) and memory.sampling >= 2 * GIB


def test_a_teachers_weights_are_counted(not_compiled):
    words = ("--algorithm.advantage=opd", "--algorithm.teacher=miniature", "--policy.lora.rank=2")
    config = configured(*words, "--policy.frozen_dtype=bfloat16", "--policy.compute_dtype=bfloat16")
    memory, _ = plan.plan_policy(config, read_shape("miniature"))
    whole = held(configured(), read_shape("miniature")).weights  # a teacher is loaded in float32
    assert memory.teacher == whole > memory.weights
    assert sum(line.bytes for line in plan.policy_lines(config, memory) if line.name == "teacher") == whole


def test_published_vision_towers_are_counted():
    towers = {name: tower for name in published_policies() if (tower := read_shape(name).vision) is not None}
    sizes = {name: count_weights(tower_shapes(tower)) for name, tower in towers.items()}
    assert sizes == {"Qwen/Qwen2-VL-7B-Instruct": 675_759_104, "Qwen/Qwen2.5-VL-7B-Instruct": 676_550_144}


def test_the_real_config_fits_large_cards(not_compiled, capsys, monkeypatch):
    monkeypatch.setattr(plan, "count_work", lambda *_: Work())  # by traces of all layers, as in the next test
    seeing = "--policy.path=Qwen/Qwen2-VL-7B-Instruct"
    command = ["--config=prompt_enhancement_sd3", seeing, "--plan", "--device_memory_gib=80,80,80"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert (
        "transformer and VAE" in said
        and "7,615,616,512 parameters" in said
        and "vision tower: 675,759,104 parameters, not loaded" in said
    )
    assert [line for line in said.splitlines() if line.startswith("gpu:")] == [f"gpu:{i}, 80.00 GiB" for i in range(3)]
    assert said.endswith("It fits.\n")


@pytest.mark.parametrize(
    ("name", "gib", "parameters"),
    [
        pytest.param("prompt_enhancement_sd3", "80,80,80", 7_615_616_512, marks=pytest.mark.wide),
        pytest.param("prompt_enhancement_sdxl_turbo", "80,80,80", 7_615_616_512, marks=pytest.mark.wide),
        pytest.param("prompt_enhancement_flux_schnell", "80,80,80", 7_615_616_512, marks=pytest.mark.wide),
        pytest.param("prompt_refinement_sd3", "80,80,80", 7_615_616_512, marks=pytest.mark.wide),
        ("prompt_enhancement_one_gpu", "24", 1_543_714_304),
        pytest.param("prompt_enhancement_one_gpu_16gb", "16", 494_032_768, marks=pytest.mark.wide),
        pytest.param("text_one_gpu", "16", 1_543_714_304, marks=pytest.mark.wide),
    ],
)
def test_a_config_of_real_size_is_planned_without_a_file(name, gib, parameters, not_compiled, capsys):
    assert main([f"--config={name}", "--plan", f"--device_memory_gib={gib}"]) == 0
    said = capsys.readouterr().out
    assert f" {parameters:,} parameters, " in said and said.endswith("It fits.\n")
    assert ("U-Net and VAE" in said) == ("sdxl" in name or name.startswith("prompt_enhancement_one_gpu"))


def test_a_folder_with_a_config_alone_is_planned(folder, not_compiled, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("task: text\nrewards: [{name: 'judge.py:letters'}]\n")
    assert main(["--config=run.yaml", f"--policy.path={folder}", *SMALL, "--plan", "--device_memory_gib=16"]) == 0
    said = capsys.readouterr().out
    assert "gpu:0, 16.00 GiB" in said and "renderer" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "run.yaml"]  # no run directory


def test_what_does_not_fit_is_named(not_compiled, monkeypatch, capsys):
    memory = PolicyMemory(10, 10, 20 * GIB, 0, 0, 0, sampling=GIB, update=2 * GIB)
    monkeypatch.setattr(plan, "plan_policy", lambda *_, **__: (memory, {}))
    assert main([*SMALL, "--plan", "--device_memory_gib=16,16,16"]) == 1
    *_, remedies, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "It does not fit: gpu:0."
    assert remedies.startswith(
        "gpu:0 needs less memory with --training.grad_accumulation_steps 4, --policy.remat layer"
    )


def test_a_card_fits_only_within_the_share_that_jax_takes_of_it(not_compiled, monkeypatch, capsys):
    """JAX takes three quarters of a card of its own, and less beside judges (`placement.memory_shares`)."""
    memory = PolicyMemory(10, 10, 3 * GIB, 0, 0, 0, sampling=GIB, update=16 * GIB)
    monkeypatch.setattr(plan, "plan_policy", lambda *_, **__: (memory, {}))
    command = ["--config=text_one_gpu", "--plan", "--device_memory_gib=24"]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "19.50 of 22.80 GiB (5% left free; JAX takes at most 18.00, torch 4.08): 1.00 GiB too much" in said
    assert "gpu:0 suffices with the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION=0.92." in said
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    assert main(command) == 0
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    (shared,) = plan.plan_devices(configured(), memory, (24.0,))
    assert shared.limits == (0.72 * 24 * GIB, 0.2 * 24 * GIB) and shared.needed < shared.room
    assert shared.excess == int(19 * GIB - 0.72 * 24 * GIB)
    alone, *_ = plan.plan_devices(configured(), memory, (26.0, 16.0))
    assert alone.limits[0] == 0.75 * 26 * GIB and not alone.excess


def test_the_verdict_is_on_the_dtype_in_use(folder, not_compiled, capsys):
    """A CPU compiles bfloat16 in float32: activations need half of that; float32 is as compiled."""
    words = ["--task=text", "--rewards=[{name: numeric_answer}]", f"--policy.path={folder}", *SMALL]
    narrow = ["--policy.compute_dtype=bfloat16", "--policy.frozen_dtype=bfloat16", "--policy.lora.rank=2"]
    assert main([*words, "--plan", "--device_memory_gib=3"]) == 1
    captured = capsys.readouterr()
    assert re.search(r"update +3\.00  compiled, with", captured.out) and "estimate" not in captured.out
    assert main([*words, *narrow, "--plan", "--device_memory_gib=3"]) == 0
    captured = capsys.readouterr()
    assert re.search(r"update +1\.50  estimate, with", captured.out)
    assert "are estimates: compiled in float32, activations scaled to bfloat16. With grpo_jax[targets]" in captured.out
    assert captured.err.splitlines() == ["compiling sample for cpu …", "compiling update for cpu …"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device_memory_gib=16"], "add --plan"),
        (["--plan", "--device_memory_gib=16,none"], "such as 16,16,16"),
        (["--plan", "--device_memory_gib=0"], "such as 16,16,16"),
        (["--plan", "--policy.path=nowhere"], "expected a folder with config.json"),
        (["--plan", "--task=recommendation"], "nothing to plan"),
        (["--plan", "--policy.lora.rank=4", "--policy.lora.targets=[c_attn]"], "policy.lora: "),
        (["--plan", "--device_memory_gib=16", "--devices.policy=gpu:3"], "there is no gpu:3"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, not_compiled):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and message in captured.err


def test_a_policy_that_samples_ahead_is_a_copy():
    config, model = of_tiny("--training.async_level=1")
    memory = held(config, model)
    assert memory.rollout_weights == memory.weights > 0  # all weights are trained
    adapters, model = of_tiny("--training.async_level=1", "--policy.lora.rank=2")
    assert 0 < held(adapters, model).rollout_weights < memory.rollout_weights / 2
    lines = plan.policy_lines(config, memory)
    parts = memory.weights + memory.optimizer + memory.reference + memory.rollout_weights
    assert sum(line.bytes for line in lines) == parts and all(line.counted for line in lines)


@pytest.mark.parametrize(("limit", "gib"), [(f"{2 * GIB}\n", 2), ("max\n", None), (f"{2**60}\n", None)])
def test_a_containers_limit_is_the_memory_of_a_cpu(limit, gib, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "CONTAINER", tmp_path / "none")
    memory = PolicyMemory(10, 10, 3 * GIB, 0, 0, 0, sampling=GIB, update=GIB)
    config = configured("--devices.policy=cpu")
    (whole,) = [card for card in plan.plan_devices(config, memory, ()) if card.name == "cpu"]
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(plan, "CONTAINER", tmp_path / "memory.max")
    (host,) = [card for card in plan.plan_devices(config, memory, ()) if card.name == "cpu"]
    assert host.capacity == (gib * GIB if gib else whole.capacity) and bool(host.excess) == bool(gib)


def test_a_judge_in_a_pool_leaves_its_card_to_the_next(not_compiled, capsys):
    """As in a run (`runs.loading`), where it has no part in the placing."""
    from bridges import placement

    pool = ("--judges.renderer.pool.replicas=4", "--judges.renderer.pool.resources={num_gpus: 1}")
    config = parse(["--config=prompt_enhancement_miniature", *pool])
    memory = held(config, read_shape("miniature"))
    first, second, third, host = plan.plan_devices(config, memory, (16.0, 16.0, 16.0))
    assert [*first.parts] == ["policy", "runtime"] and [*second.parts] == ["scorer", "runtime"] and not third.parts
    assert host.name == "cpu" and "4 actors of a Ray cluster" in host.parts["renderer"][0].note
    places, _ = placement.resolve({name: where for name, where in config.requests.items() if name != "renderer"}, 3)
    assert places == {"policy": "gpu:0", "scorer": "gpu:1"}
    assert main([*pool, "--devices.renderer=gpu:1", "--plan", "--device_memory_gib=16,16"]) == 2
    assert "devices.renderer: expected none for a judge in a pool" in capsys.readouterr().err


@pytest.mark.parametrize(("cards", "policy"), [(8, 1), (64, 3), (512, 8)])
def test_an_example_of_many_cards_counts_them(cards, policy):
    file = ROOT / "examples" / "many_cards" / f"{cards}.yaml"
    config = parse(["--config=prompt_enhancement_sd3", f"--config={file}"])
    drawing, scoring = (config.judges[name].pool.replicas for name in ("renderer", "scorer"))
    assert policy + drawing + scoring == cards
    places = {"policy": tuple(f"gpu:{card}" for card in range(policy)), "detector": ("gpu:0",)}
    assert plan.places_of(config, policy) == places | {"renderer": ("cpu",), "scorer": ("cpu",)}
