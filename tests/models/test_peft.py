"""Adapters in PEFT's format, both ways, against PEFT itself: names, logits, merged weights, refusals."""

import functools
import json

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", reason="needs the package peft (pip install peft)")
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from support import torch_reference as reference  # noqa: E402
from support.folders import load_folder  # noqa: E402
from support.tiny_decoders import merged_params, normal_like  # noqa: E402

from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.models.hf import folder as hf  # noqa: E402
from grpo_jax.models.hf.peft import load_adapters, save_adapters  # noqa: E402
from grpo_jax.models.lora import LoraConfig, init_adapters, merge  # noqa: E402
from grpo_jax.models.policy import Policy  # noqa: E402

# PEFT's own calls of what transformers and PEFT are about to drop.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TARGETS = {
    "qwen2": ("q_proj", "v_proj", "down_proj"),
    "gpt2": ("c_attn", "attn_c_proj", "mlp_c_proj"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "qwen2_5_vl": ("q_proj", "gate_proj"),  # its vision tower has a gate_proj too
}
AUTO = {"qwen2_5_vl": transformers.AutoModelForImageTextToText}


class World:
    """An architecture's random folder, its policy, and adapters that are not at their start of zeros."""

    def __init__(self, folder, architecture):
        self.architecture = architecture
        self.source = reference.folder(folder / "source", architecture)
        self.loaded = load_folder(self.source, tokenizer=False)
        self.config = self.loaded.config
        self.lora = LoraConfig(rank=3, alpha=7.0, targets=TARGETS[architecture])
        make = functools.partial(init_adapters, key=jax.random.key(0), lora=self.lora)
        self.adapters = normal_like(jax.eval_shape(make, self.loaded.params), 0.3)
        self.programs = {}

    def base(self):
        model = AUTO.get(self.architecture, transformers.AutoModelForCausalLM).from_pretrained(self.source)
        return model.eval()

    def logits(self, variables, lora):
        policy, (tokens, mask) = Policy(self.config, lora=lora, remat="none"), token_batch()

        def read(variables):
            return policy.prefill(variables, tokens, mask).hidden @ policy.head(variables).T

        return np.asarray(self.programs.setdefault(lora, jax.jit(read))(variables))


def token_batch():
    tokens, mask = reference.unshared(*reference.group_batch(length=9))
    return tokens[:, :9], mask[:, :9]


def torch_logits(model):
    with torch.no_grad():
        return reference.logits(model, *token_batch())[:, -1].numpy()


@pytest.fixture(scope="module", params=TARGETS)
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    """Our adapters as a folder."""
    folder = tmp_path_factory.mktemp("written") / "adapter"
    save_adapters(folder, world.adapters, world.lora, world.config, base=str(world.source))
    return folder


def test_peft_computes_what_we_compute(world, written):
    lora, adapters = load_adapters(written, world.config)
    assert lora == world.lora
    jax.tree.map(np.testing.assert_array_equal, adapters, world.adapters)
    ours = world.logits({"params": world.loaded.params, "lora": world.adapters}, world.lora)
    plain = world.logits({"params": world.loaded.params}, None)
    assert np.abs(ours - plain).max() > 0.1
    model = peft.PeftModel.from_pretrained(world.base(), written)
    reached = {name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    assert len(reached) == len(world.lora.targets) * world.config.num_layers  # and nothing in a vision tower
    np.testing.assert_allclose(torch_logits(model), ours, atol=1e-4)
    with model.disable_adapter():
        np.testing.assert_allclose(torch_logits(model), plain, atol=1e-4)


def test_merged_weights_are_pefts(world, written, tmp_path):
    variables = {"params": world.loaded.params, "lora": world.adapters}
    hf.save_folder(tmp_path / "policy", world.loaded.path, world.loaded.config, merge(variables, world.lora))
    model = peft.PeftModel.from_pretrained(world.base(), written).merge_and_unload()
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("policy", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-5, msg=name)
    merged = world.logits({"params": merged_params(variables, world.lora)}, None)
    np.testing.assert_allclose(torch_logits(model), merged, atol=1e-4)


THEIRS = {
    "phi3": [dict(target_modules="all-linear")],
    "qwen2": [
        dict(target_modules=["q_proj", "mlp.up_proj"]),
        dict(target_modules=r"model\.layers\.\d+\.self_attn\.(k|o)_proj"),
        dict(target_modules="all-linear", exclude_modules=["down_proj"]),
    ],
    "gpt2": [dict(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)],  # both projections of that name
    "qwen2_5_vl": [dict(target_modules=["q_proj", "gate_proj"], exclude_modules=r".*visual.*")],
}


def make_peft(world, folder, **options):
    """An adapter that PEFT made, with weights that matter; the model that has it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=6, lora_dropout=0.1, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(world.base(), config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 * torch.randn(weight.shape))
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


def test_we_compute_what_peft_computes(world, tmp_path):
    for number, options in enumerate(THEIRS[world.architecture]):
        model = make_peft(world, tmp_path / str(number), **options)
        lora, adapters = load_adapters(tmp_path / str(number), world.config)
        assert (lora.rank, lora.alpha) == (4, 6.0)
        ours = world.logits({"params": world.loaded.params, "lora": adapters}, lora)
        np.testing.assert_allclose(ours, torch_logits(model), atol=1e-4)
        assert np.abs(ours - world.logits({"params": world.loaded.params}, None)).max() > 0.1


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return World(tmp_path_factory.mktemp("qwen"), "qwen2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(use_dora=True), "use_dora=True is not supported"),
        (dict(init_lora_weights="pissa"), "init_lora_weights: expected plain LoRA .* got 'pissa'"),
        (dict(target_modules=["q_proj", "lm_head"]), r"lm_head\.lora_A\.weight is unexpected"),
        (dict(target_modules=["lm_head"]), "not those of a 'qwen2' model"),
        (dict(target_modules=r".*layers\.1\..*q_proj"), "target_modules: expected q_proj in all layers or in none"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_we_do_not_compute_is_refused_by_name(qwen, tmp_path, options, message):
    make_peft(qwen, tmp_path / "adapter", **{"target_modules": ["q_proj"], **options})
    with pytest.raises(UserError, match=message):
        load_adapters(tmp_path / "adapter", qwen.config)


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if name not in key}


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({}, without("layers.1.self_attn.q_proj.lora_B"), r"layers\.1\.self_attn\.q_proj\.lora_B\.weight is missing"),
        ({}, without("q_proj"), r"q_proj\.lora_A\.weight is missing.*and \d+ more|q_proj.*is missing"),
        (
            {},
            lambda found: found | {A: torch.zeros(5, 32) for A in found if "lora_A" in A},
            r"q_proj\.lora_A\.weight has shape \(5, 32\), expected \(3, 32\)",
        ),
        ({"peft_type": "LOHA"}, None, "peft_type: expected 'LORA', got 'LOHA'"),
        ({"use_something_new": 1}, None, "use_something_new=1 is not supported"),
        ({"r": 0}, None, "rank: expected a number >= 1, got 0"),
        ({"lora_alpha": 0}, None, "alpha: expected a number > 0, got 0.0"),
        ({"target_modules": None}, None, "target_modules: expected some of .* got None"),
        ({"target_modules": "("}, None, "adapter_config.json"),
    ],
)
def test_a_folder_that_does_not_fit_gives_one_line(qwen, tmp_path, fields, change, message):
    folder = tmp_path / "adapter"
    save_adapters(folder, qwen.adapters, qwen.lora, qwen.config, base="somewhere")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    if change is not None:
        save_file(change(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=message) as caught:
        load_adapters(folder, qwen.config)
    assert "\n" not in str(caught.value)


def test_without_an_alpha_it_is_pefts_default(qwen, tmp_path):
    save_adapters(tmp_path / "adapter", qwen.adapters, qwen.lora, qwen.config, base="somewhere")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({name: x for name, x in json.loads(path.read_text()).items() if name != "lora_alpha"}))
    assert load_adapters(tmp_path / "adapter", qwen.config)[0].alpha == peft.LoraConfig().lora_alpha


def test_places_that_hold_something_else(qwen, tmp_path):
    with pytest.raises(UserError, match=r"has no adapter_config\.json"):
        load_adapters(qwen.source, qwen.config)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_text("")
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors"):
        load_adapters(tmp_path, qwen.config)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="else than a folder of adapters"):
        save_adapters(tmp_path / "mine", qwen.adapters, qwen.lora, qwen.config, base="somewhere")
    with pytest.raises(UserError, match="cannot write the adapters"):
        save_adapters("/proc/adapter", qwen.adapters, qwen.lora, qwen.config, base="somewhere")
