"""LoRA in training: the state, the written files, and restarts."""

import importlib.util
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from support import tiny_update
from support.folders import load_folder
from support.text_task import final_state, rows, train_here

from grpo_jax import export
from grpo_jax.config.command_line import parse
from grpo_jax.config.sections import AlgorithmSection, LoraSection, OptimizerSection, TrainingSection
from grpo_jax.errors import UserError
from grpo_jax.models.architectures import gpt2, llama, read_model_config
from grpo_jax.models.architectures.gpt2 import GPT2Config
from grpo_jax.models.hf.peft import load_adapters, lora_config
from grpo_jax.models.lora import LoraConfig, as_array, quantise
from grpo_jax.models.policy import Policy
from grpo_jax.runs.policy import load_run_policy
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import init_state, make_optimizer, reference_variables, refresh_reference
from grpo_jax.training.update import make_update

LORA = LoraConfig(2, 4.0, ("q_proj", "v_proj"))
PROJECTIONS, GPT2_PROJECTIONS = map(tuple, (llama.LLAMA_ARCHITECTURE.projections, gpt2.GPT2_ARCHITECTURE.projections))


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def pointers(tree):
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


@pytest.fixture(scope="module")
def adam():
    """Two AdamW updates with a KL: the start, the state after init, and the state after them."""
    section = AlgorithmSection(kl_coef=0.1)
    variables = tiny_update.make_variables(lora=LORA)
    optimizer = make_optimizer(OptimizerSection(), optax.constant_schedule(0.01))
    policy = Policy(tiny_update.CONFIG, lora=LORA, remat="none")
    training = TrainingSection(prompts_per_batch=tiny_update.PROMPTS)
    update = make_update(policy, optimizer, section, training, temperature=1.0, max_new_tokens=8)
    first = init_state(variables, optimizer, keep_reference=True)
    held = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), first)
    state, _ = update(first, tiny_update.make_batch(), jax.random.key(2))
    state, _ = update(state, tiny_update.make_batch(), jax.random.key(3))
    return variables, held, state


def test_the_state_is_the_base_once_and_three_times_the_adapters(adam):
    """Beyond the frozen base: adapters and Adam's two moments of them, in float32, and counters."""
    variables, held, state = adam
    adapters = bytes_of(variables["lora"])
    assert adapters == 4 * 2 * 2 * ((32 + 32) + (32 + 16))  # float32, layers, rank, (in + out) of q and v
    assert pointers(state.variables["params"]) == pointers(variables["params"])  # the very arrays
    beyond = [leaf for leaf in jax.tree.leaves(state) if leaf.unsafe_buffer_pointer() not in pointers(variables)]
    counters = [leaf for leaf in beyond if leaf.ndim == 0]
    assert bytes_of(beyond) == 3 * adapters + bytes_of(counters) and len(counters) <= 4
    assert state.reference is None
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == held


def test_adapters_that_say_something_are_the_reference():
    """Read from a folder, warm-started, or refreshed later: then the base alone is not where training began."""
    variables = tiny_update.make_variables(lora=LORA)
    variables["lora"] = jax.tree.map(lambda leaf: leaf + 0.1, variables["lora"])
    state = init_state(variables, optax.sgd(1.0), keep_reference=True, base_reference=False)
    reference = reference_variables(state)
    jax.tree.map(np.testing.assert_array_equal, reference["lora"], variables["lora"])
    refreshed = refresh_reference(state)
    assert jax.tree.structure(refreshed) == jax.tree.structure(state)  # a checkpoint of one restores into the other


SMALL_GPT2 = dict(model_type="gpt2", vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("model", "projections"),
    [
        (tiny_update.CONFIG, PROJECTIONS),
        (GPT2Config.from_hf(SMALL_GPT2), GPT2_PROJECTIONS),
        (read_model_config(SMALL | dict(model_type="phi3")), FUSED),
    ],
    ids=["qwen2", "gpt2", "phi3"],
)
def test_without_a_choice_every_projection_has_an_adapter(model, projections):
    assert lora_config(LoraSection(rank=4), model) == LoraConfig(4, 32.0, projections)
    chosen = lora_config(LoraSection(rank=4, alpha=8.0, targets=[projections[0]]), model)
    assert chosen == LoraConfig(4, 8.0, projections[:1])
    assert lora_config(LoraSection(), model) is None
    other = "gate_proj" if "gate_proj" not in projections else "c_attn"
    with pytest.raises(UserError, match=f"policy.lora: targets.*{other}"):
        lora_config(LoraSection(rank=4, targets=[other]), model)


# Where qwix is installed the base is stored in few bits: what is merged and written is then the rounded one.
KIND = "int8" if importlib.util.find_spec("qwix") else "none"
STEPS = ["--training.max_steps=2", "--training.inner_epochs=1", "--training.minibatches=1"]
STEPS += ["--policy.quantised", KIND]
ADAPTERS = [*STEPS, "--policy.lora.rank=2", "--algorithm.update_ref_every=1", "--training.save_every=1"]


@pytest.fixture(scope="module")
def run(place, tmp_path_factory):
    """Two iterations with adapters, the reference refreshed after the first, a checkpoint after each."""
    run = tmp_path_factory.mktemp("lora") / "run"
    assert train_here(place.config, run, *ADAPTERS) == 0
    return run


def test_a_run_writes_its_adapters_beside_the_merged_policy(place, run, tmp_path, capsys):
    config = load_folder(place.policy, tokenizer=False).config
    lora, adapters = load_adapters(run / "adapter", config)
    assert lora == LoraConfig(2, 32.0, PROJECTIONS)
    final = final_state(run)[0]["variables"]
    assert set(final) == {"lora"}
    jax.tree.map(np.testing.assert_array_equal, adapters, final["lora"])
    described = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(place.policy.resolve())
    base, merged = (load_folder(folder, tokenizer=False).params for folder in (place.policy, run / "policy"))
    if KIND != "none":
        base = quantise(base, KIND)
        assert f"float32 on {KIND}, LoRA rank 2" in (run / "train.log").read_text()
    for name in PROJECTIONS:
        a, b = (np.asarray(adapters["layers"][name][factor], np.float64) for factor in "ab")
        expected = as_array(base["layers"][name]["kernel"], jnp.float32) + a @ b * (32.0 / 2)
        np.testing.assert_allclose(merged["layers"][name]["kernel"], expected, atol=1e-6)

    assert export.main(["--run", str(run), "--out", str(tmp_path / "first"), "--checkpoint", "1", "--adapters"]) == 0
    assert "the adapters of" in capsys.readouterr().out
    first = load_adapters(tmp_path / "first", config)[1]
    jax.tree.map(np.testing.assert_array_equal, first, final_state(run, 1)[0]["variables"]["lora"])
    arguments = ["--run", str(run), "--out", str(tmp_path / "x"), "--adapters", "--dtype", "bfloat16"]
    assert export.main(arguments) == 2 and "--dtype is for the whole policy" in capsys.readouterr().err


def test_training_starts_from_a_folder_of_adapters(place, run, tmp_path, capsys):
    """What was measured at the end there is measured at the start here, and the reference is that start."""
    options = ["--policy.lora.path", str(run / "adapter"), "--algorithm.update_ref_every", "0"]
    assert train_here(place.config, tmp_path / "run", *STEPS, *options) == 0
    end, start = (json.loads((folder / "summary.json").read_text()) for folder in (run, tmp_path / "run"))
    for name, values in end["evaluation"].items():
        assert start["evaluation"][name]["before"] == pytest.approx(values["after"], abs=1e-6)
    assert rows(tmp_path / "run")[0]["kl"] == 0
    described = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert described["r"] == 2 and described["lora_alpha"] == 32
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["policy"]["lora"]["rank"] == 0
    moved, started = (final_state(folder)[0]["variables"]["lora"] for folder in (tmp_path / "run", run))
    assert any(bool((a != b).any()) for a, b in zip(*map(jax.tree.leaves, (moved, started)), strict=True))
    assert "was trained on" not in (tmp_path / "run" / "train.log").read_text()
    merged, adapter, notes = tmp_path / "merged", run / "adapter", []
    shutil.copytree(run / "policy", merged)  # which has the adapter already
    twice = parse(["--task=text", f"--policy.path={merged}", f"--policy.lora.path={adapter}"])
    load_run_policy(twice, jax.devices()[:1], lambda *line: notes.append(line))
    warning = f"warning: the adapter in {adapter} was trained on {place.policy.resolve()}, and policy.path is"
    assert notes[-1] == ("policy", f"{warning} {merged.resolve()}")
    capsys.readouterr()
    assert train_here(place.config, tmp_path / "none", *STEPS, "--policy.lora.path", str(tmp_path)) == 2
    assert "has no adapter_config.json" in capsys.readouterr().err


def test_a_run_without_adapters_has_none_to_export(place, tmp_path, capsys):
    config = yaml.safe_load(place.config.read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    from grpo_jax.runs.checkpoint import Checkpoints

    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        params = load_folder(place.policy, tokenizer=False).params
        checkpoints.save_as("final", 1, {"variables": {"params": jax.tree.map(jnp.asarray, params)}}, {})
    assert export.main(["--run", str(tmp_path), "--out", str(tmp_path / "out"), "--adapters"]) == 2
    assert "this run trained all weights and has none" in capsys.readouterr().err


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_the_backward_pass_keeps_one_array_of_a_projection_and_its_adapter(compute_dtype):
    """Beside the adapter's own, which is as narrow as its rank (`remat: products`)."""
    batch = tiny_update.make_batch()
    tokens = batch.prompt_tokens.size + batch.tokens[..., 1:].size

    def widths(trained, **options):
        """Of the arrays [layers, tokens, width] that a gradient by these variables keeps."""
        variables = tiny_update.make_variables(**options)
        forward = make_forward(Policy(tiny_update.CONFIG, compute_dtype=compute_dtype, **options), temperature=1.0)

        def logprobs(weights):
            return forward({**variables, trained: weights}, batch).logprobs

        kept = jax.tree.leaves(jax.eval_shape(lambda weights: jax.vjp(logprobs, weights)[1], variables[trained]))
        return sorted(leaf.shape[2] for leaf in kept if leaf.ndim == 3 and leaf.shape[1] == tokens)

    base = widths("params")
    assert len(base) == len(PROJECTIONS) - 1  # the last one's is part of the next layer's input
    assert widths("lora", lora=LoraConfig(1, 2.0, PROJECTIONS)) == [1] * len(PROJECTIONS) + base
