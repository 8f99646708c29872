"""Every program of the shipped configs and of the methods compiles for an absent GPU and TPU.

One layer, and narrow ones for all but one case: what a width changes is the time that libtpu takes.
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.vision.folders import SETTINGS

from grpo_jax.config.command_line import parse
from grpo_jax.models.attention import has_triton
from grpo_jax.models.random_init import write_policy
from grpo_jax.models.sharding import make_mesh
from grpo_jax.planning.memory import published_policies, read_shape, read_shown
from grpo_jax.planning.programs import compile_program, report_program, run_programs
from grpo_jax.planning.targets import Target, open_devices, prepare

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "targets"))

from launches import program_sizes, read_program

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
LAYER = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_hidden_layers": 1}
QWEN2 = LAYER | {"model_type": "qwen2", "vocab_size": 2048, "num_key_value_heads": 1, "tie_word_embeddings": True}
HALF_BILLION = (
    QWEN2
    | {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151936}
)
MARKS = {"image_token_id": 2000, "video_token_id": 2001, "vision_start_token_id": 2002, "vision_end_token_id": 2003}
TOWER = {"depth": 1, "num_heads": 4, "hidden_size": 256, "patch_size": 14}
TOWERS = {
    "qwen2_vl": TOWER | {"embed_dim": 256},
    "qwen2_5_vl": TOWER | {"intermediate_size": 512, "out_hidden_size": 256, "fullatt_block_indexes": [0]},
    "qwen3_vl": TOWER
    | {"intermediate_size": 512, "out_hidden_size": 256, "patch_size": 16}
    | {"num_position_embeddings": 256, "deepstack_visual_indexes": [0]},
}
BFLOAT16 = ("--policy.compute_dtype=bfloat16", "--policy.frozen_dtype=bfloat16", "--policy.remat=layer")
LORA = (*BFLOAT16, "--policy.lora.rank=16")
TEXT = (
    *("--task=text", "--data.max_prompt_tokens=128", "--sampling.max_new_tokens=32", "--training.inner_epochs=2"),
    *("--training.prompts_per_batch=8", "--sampling.group_size=4", "--algorithm.kl_coef=0.01"),
)


def seeing(model_type):
    """A narrow Qwen-VL as its config.json says it."""
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    return QWEN2 | {"model_type": model_type, "vision_config": TOWERS[model_type]} | MARKS | rope


class Case(NamedTuple):
    """A policy's config.json ({} for the config's own), and what is on the command line."""

    name: str
    fields: dict
    arguments: tuple[str, ...] = ()


METHODS = [
    Case("half a billion", HALF_BILLION, (*TEXT, *BFLOAT16, "--sampling.max_new_tokens=128")),
    Case("float32", QWEN2, TEXT),
    Case("lora", QWEN2, (*TEXT, *LORA)),
    Case("int8", QWEN2, (*TEXT, *LORA, "--policy.quantised=int8")),
    Case("int4", QWEN2, (*TEXT, *LORA, "--policy.quantised=int4")),
    Case("ppo", QWEN2, (*TEXT, *BFLOAT16, "--algorithm.advantage=gae", "--algorithm.kl_coef=0", "--ppo.kl_coef=.01")),
    Case(
        "grad_accumulation_steps",
        QWEN2,
        (*TEXT, *BFLOAT16, "--training.grad_accumulation_steps=2", "--training.minibatches=2"),
    ),
    Case("gemma 2", QWEN2 | {"model_type": "gemma2", "head_dim": 128, "num_hidden_layers": 2}, (*TEXT, *BFLOAT16)),
    Case("gemma 3", QWEN2 | {"model_type": "gemma3_text", "head_dim": 128}, (*TEXT, *BFLOAT16)),
    Case("phi 3", QWEN2 | {"model_type": "phi3"}, (*TEXT, *BFLOAT16)),
    *(Case(kind, seeing(kind), ("--config=prompt_refinement_sd3", "--policy.lora.vision=true")) for kind in TOWERS),
    Case("mesh", QWEN2, (*TEXT, *LORA, "--policy.mesh.fsdp=2", "--policy.mesh.tensor=2")),
]


def shipped(path):
    """The case of a shipped config: of a large policy only one narrow layer."""
    config = parse([f"--config={path}"])
    published = published_policies().get(config.policy.path)
    kind = "" if published is None else published["model_type"]
    fields = seeing(kind) if kind in TOWERS else QWEN2 | {"model_type": kind} if kind else {}
    return Case(path.stem, fields, (f"--config={path}",))


KERNEL = r'custom_call_target="(?:__gpu\$xla.gpu.triton|tpu_custom_call)"'
WORDS = [f"word{i}" for i in range(500)]


@pytest.fixture(params=["h100", "v5e"])
def target(request, monkeypatch):
    """A target's name, where its compiler is installed."""
    monkeypatch.setenv("XLA_FLAGS", "")  # back afterwards: libtpu must not see it
    needs = {"h100": "jax_plugins.xla_cuda13", "v5e": "libtpu"}[request.param]
    pytest.importorskip(needs, reason="needs grpo_jax[targets]")
    prepare()
    return request.param


def configured(case, folder):
    """The case's config, its policy in a folder that holds no weights."""
    config = parse(list(case.arguments))
    if case.fields:
        (folder / "config.json").write_text(json.dumps(case.fields))
        patch = case.fields.get("vision_config", TOWER)["patch_size"]
        (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | {"patch_size": patch}))
    elif config.policy.path == "new":
        write_policy(folder, WORDS, config.policy.new)
    else:
        return config
    return parse([*case.arguments, f"--policy.path={folder}"])


@pytest.mark.targets
@pytest.mark.parametrize("case", [*CONFIGS, *METHODS], ids=lambda case: getattr(case, "stem", "") or case.name)
def test_a_runs_programs_compile(case, target, tmp_path):
    config = configured(case if isinstance(case, Case) else shipped(case), tmp_path)
    section = config.policy.mesh
    chosen = Target(target, section.size)
    devices = open_devices(chosen)
    mesh = make_mesh(section.fsdp, section.tensor, devices) if section.size > 1 else None
    model = read_shape(config.policy.path)
    shown, _ = read_shown(config, model)
    programs = run_programs(config, model, mesh, shown, chosen.platform)
    assert programs.keys() - {"vision", "turn", "logprobs"} == {"sample", "update"}
    assert ("turn" in programs) == (config.sampling.turns > 1)
    for program in programs.values():
        compiled = report_program(program, chosen, devices[0], section.size)
        assert compiled.peak_bytes > compiled.argument_bytes > 0 and compiled.work.flops > 0


WIDE = (  # of sizes that no array of tokens has
    QWEN2
    | {"hidden_size": 1152, "intermediate_size": 4224, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "num_hidden_layers": 2}
)


@pytest.mark.targets
@pytest.mark.parametrize("target", ["h100"], indirect=True)
@pytest.mark.parametrize("quantised", ["none", "int8"])
def test_one_copy_of_a_frozen_base_serves_decoding_and_training(quantised, target, tmp_path):
    case = Case("frozen", WIDE, (*TEXT, *LORA, "--training.chunk_prompts=1", f"--policy.quantised={quantised}"))
    config = configured(case, tmp_path)
    chosen, model = Target(target), read_shape(config.policy.path)
    programs = run_programs(config, model, None, None, chosen.platform)
    layers = [name for name in programs["sample"].arguments[0]["params"] if name.startswith("layers")]
    assert layers == ["layers_0", "layers_1"]
    sizes = program_sizes(config, model, None)
    for program in programs.values():
        compiled = compile_program(program, chosen, open_devices(chosen)[0])
        reading = read_program(compiled, sizes._replace(turns=program.turns))
        assert reading.kernels > 0 and reading.weight_copies == 0


@pytest.mark.targets
def test_long_completions_are_read_by_the_targets_own_attention(target, tmp_path):
    """Forward and backward; no scores or masks of a row of 428 tokens are held."""
    config = configured(Case("long", QWEN2, (*TEXT, *BFLOAT16, "--sampling.max_new_tokens=301")), tmp_path)
    chosen, model = Target(target), read_shape(config.policy.path)
    program = run_programs(config, model, None, None, chosen.platform)["update"]
    text = compile_program(program, chosen, open_devices(chosen)[0]).as_text()
    assert len(re.findall(KERNEL, text)) >= 3
    assert not re.search(r"\[(?:\d+,)*(?:300,300|428,428|512,512)\]", text)


@pytest.mark.targets
@pytest.mark.parametrize("target", ["h100"], indirect=True)
def test_long_completions_are_trained_by_cudnn_where_it_is_chosen(target, tmp_path):
    pytest.importorskip("nvidia.cudnn", reason="needs nvidia-cudnn-cu13")
    options = (*TEXT, *BFLOAT16, "--sampling.max_new_tokens=301", "--policy.attn_implementation=cudnn")
    config = configured(Case("long", QWEN2, options), tmp_path)
    chosen, model = Target(target), read_shape(config.policy.path)
    program = run_programs(config, model, None, None, chosen.platform)["update"]
    text = compile_program(program, chosen, open_devices(chosen)[0]).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text and not re.search(KERNEL, text)
    assert not re.search(r"\[(?:\d+,)*(?:300,300|428,428|512,512)\]", text)


@pytest.mark.targets
@pytest.mark.parametrize("target", ["h100"], indirect=True)
def test_without_triton_in_jax_a_gpu_trains_and_samples_by_products(target, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    has_triton.cache_clear()
    try:
        config = configured(Case("long", QWEN2, (*TEXT, *BFLOAT16, "--sampling.max_new_tokens=301")), tmp_path)
        chosen, model = Target(target), read_shape(config.policy.path)
        for program in run_programs(config, model, None, None, chosen.platform).values():
            compiled = compile_program(program, chosen, open_devices(chosen)[0])
            assert not re.search(KERNEL, compiled.as_text())
    finally:
        has_triton.cache_clear()


@pytest.mark.targets
@pytest.mark.parametrize("target", ["h100"], indirect=True)
def test_narrow_gradients_of_kernels_take_half_the_memory_of_wide_ones(target, tmp_path):
    """What all kernels would take in bfloat16 is saved: no stack of float32 gradients is there beside them."""
    deep = QWEN2 | {"intermediate_size": 4096, "num_hidden_layers": 12}
    chosen = Target(target)

    def temporaries(grad_dtype):
        config = configured(Case("narrow", deep, (*TEXT, *BFLOAT16, f"--training.grad_dtype={grad_dtype}")), tmp_path)
        program = run_programs(config, read_shape(config.policy.path), None, None, chosen.platform)["update"]
        return report_program(program, chosen, open_devices(chosen)[0]).temporary_bytes

    kernels = 12 * 256 * (256 + 2 * 128 + 256 + 3 * 4096)
    assert temporaries("float32") - temporaries("bfloat16") > 0.9 * 2 * kernels


@pytest.mark.targets
@pytest.mark.parametrize("target", ["h100"], indirect=True)
def test_a_decoded_tokens_attention_is_one_kernel(target, tmp_path):
    """Of two layers, those of the head and of the draw counted; none moves a layer's keys or values."""
    two = HALF_BILLION | {"num_hidden_layers": 2}
    config = configured(Case("decoding", two, (*TEXT, *BFLOAT16, "--sampling.max_new_tokens=128")), tmp_path)
    chosen, model = Target(target), read_shape(config.policy.path)
    program = run_programs(config, model, None, None, chosen.platform)["sample"]
    compiled = compile_program(program, chosen, open_devices(chosen)[0])
    assert re.search(r"/layers_1/[\w./]*decode_attention/pallas_call", compiled.as_text())
    sizes = program_sizes(config, model, None)._replace(turns=program.turns)
    reading = read_program(compiled, sizes)
    assert 0 < reading.layer_kernels <= 10 and reading.cache_copies == 0
