"""GPT-2 against transformers and against itself: logits, gradients, caching, adapters, folders, sampling, refusals."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import test_models_parity as parity  # noqa: E402
import tiny_models  # noqa: E402
import torch_reference as reference  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

from grpo_jax import train  # noqa: E402
from grpo_jax.core.logprobs import token_logprobs  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.models import hf  # noqa: E402
from grpo_jax.models.decoder import init_variables, make_policy  # noqa: E402
from grpo_jax.models.families.gpt2 import GPT2Config  # noqa: E402
from grpo_jax.models.layers import ACTIVATIONS  # noqa: E402
from grpo_jax.models.lora import GPT2_PROJECTIONS, LoraConfig, init_adapters, merge  # noqa: E402
from grpo_jax.sampling.sampler import SamplingParams, make_sampler  # noqa: E402

SMALL = dict(model_type="gpt2", vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
LORA = LoraConfig(rank=2, alpha=6.0, targets=("c_attn", "attn_c_proj", "mlp_c_proj"))
SCALED = dict(scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return reference.folder(tmp_path_factory.mktemp("gpt2") / "source", "gpt2", **SCALED)


@pytest.fixture(scope="module")
def loaded(source):
    return hf.load_folder(source, tokenizer=False)


@pytest.fixture(scope="module")
def variables(loaded):
    fresh = init_adapters(loaded.params, jax.random.key(0), LORA)
    rng = np.random.default_rng(1)
    shaken = jax.tree.map(lambda leaf: leaf + jnp.asarray(0.1 * rng.normal(size=leaf.shape), jnp.float32), fresh)
    return {"params": loaded.params, "lora": shaken}


@pytest.fixture(scope="module")
def policy(loaded):
    functions = make_policy(loaded.config, lora=LORA)
    return functions._replace(
        prefill=jax.jit(functions.prefill),
        decode=jax.jit(functions.decode),
        forward_group=jax.jit(functions.forward_group),
    )


def tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_logprobs_and_gradients_are_those_of_transformers(tmp_path):
    parity.test_logprobs_and_grpo_gradients(tmp_path, "gpt2", {})


@pytest.mark.parametrize(
    "change",
    [
        dict(n_inner=None),
        dict(activation_function="relu"),
        dict(layer_norm_epsilon=0.5),
        dict(scale_attn_weights=False),
        SCALED,
    ],
    ids="-".join,
)
def test_field_is_honoured(tmp_path, change):
    parity.test_field_is_honoured(tmp_path, "gpt2", change)


def test_upcast_attention_is_what_is_computed_anyway(tmp_path, source):
    """Scores are float32 here whatever the field says, so the same configuration is read."""
    model = reference.model("gpt2", reorder_and_upcast_attn=True, **SCALED)
    model.save_pretrained(tmp_path / "upcast")
    assert hf.load_folder(tmp_path / "upcast", tokenizer=False).config == hf.load_folder(source, tokenizer=False).config
    tokens, mask = reference.unshared(*reference.group_batch())
    with torch.no_grad():
        got = reference.logits(model, tokens, mask)
        expected = reference.logits(reference.model("gpt2", **SCALED), tokens, mask)
    np.testing.assert_allclose(got[mask], expected[mask], atol=1e-5)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_is_that_of_transformers(name):
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), ACT2FN[name](torch.tensor(x)), atol=1e-6)


def test_cached_decoding_equals_the_full_forward(policy, variables):
    """With adapters on the fused projection, left padding, and a scale of its own in each layer."""
    prompt_tokens, prompt_mask, tokens, _ = reference.group_batch()
    full = policy.forward_group(variables, prompt_tokens, prompt_mask, tokens, np.ones(tokens.shape, bool))
    prefix, unstacked = policy.prefill(variables, prompt_tokens, prompt_mask), policy.unstack(variables)
    assert [x.shape for x in prefix.keys] == [(3, 4, 8, 6)] * 2  # a prompt once, not once per completion
    cache = policy.init_cache(*tokens.shape)
    np.testing.assert_allclose(full[:, :, 0], np.repeat(prefix.hidden[:, None], 2, 1), atol=1e-4)
    for step in range(tokens.shape[2] - 1):
        hidden, cache = policy.decode(unstacked, prefix, jnp.asarray(tokens[:, :, step]), cache)
        np.testing.assert_allclose(hidden, full[:, :, step + 1], atol=1e-4)


def test_padding_has_no_influence(policy, variables):
    """Positions count from the first real token: more padding on the left gives the same states."""
    prompt_tokens, prompt_mask, tokens, mask = reference.group_batch()
    expected = policy.forward_group(variables, prompt_tokens, prompt_mask, tokens, mask)
    wide = np.pad(prompt_tokens, ((0, 0), (3, 0)), constant_values=9), np.pad(prompt_mask, ((0, 0), (3, 0)))
    got = policy.forward_group(variables, *wide, np.where(mask, tokens, 10**6).astype(np.int32), mask)
    np.testing.assert_allclose(got[mask], expected[mask], atol=1e-4)


def test_adapters_on_the_fused_projection(policy, variables, loaded):
    batch = reference.group_batch()
    base = {"params": loaded.params}
    adapted = policy.forward_group(variables, *batch)
    np.testing.assert_allclose(
        policy.forward_group({"params": merge(variables, LORA)}, *batch)[batch[3]], adapted[batch[3]], atol=2e-4
    )
    plain = policy.forward_group(base, *batch)
    assert float(jnp.abs(adapted - plain)[batch[3]].max()) > 0.1
    assert set(variables["lora"]["layers"]) == set(LORA.targets)
    assert variables["lora"]["layers"]["c_attn"]["b"].shape == (2, 2, 96)


@pytest.mark.parametrize("targets", [("q_proj",), ("c_attn", "gate_proj")])
def test_targets_of_another_architecture_are_refused(loaded, targets):
    with pytest.raises(ValueError, match=rf"c_attn.*{targets[-1]}"):
        make_policy(loaded.config, lora=LoraConfig(rank=2, targets=targets))
    with pytest.raises(ValueError, match="attn_c_proj"):
        LoraConfig(rank=2, targets=("c_proj",))  # two projections have that name


def rename(folder, change):
    """Rewrite a folder's single file with changed names and more tensors."""
    save_file(change(tensors(folder)), folder / "model.safetensors", metadata={"format": "pt"})


def as_on_the_hub(stored):
    """No prefix, and the causal masks as tensors, as in openai-community/gpt2."""
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    for layer in range(2):
        bare[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(1, 1, 64, 64))
        bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return bare


@pytest.mark.parametrize(
    ("dtype", "change", "names"),
    [
        (torch.float32, {}, None),
        (torch.float32, {}, as_on_the_hub),
        (torch.bfloat16, dict(max_shard_size="20KB", tie_word_embeddings=False), None),
        (torch.float16, {}, lambda stored: stored | {"lm_head.weight": stored["transformer.wte.weight"].clone()}),
    ],
    ids=["tied", "hub", "sharded", "repeated head"],
)
def test_round_trip_is_bit_equal(tmp_path, dtype, change, names):
    source = reference.folder(tmp_path / "source", "gpt2", dtype=dtype, **change)
    if names is not None:
        rename(source, names)
    loaded = hf.load_folder(source, tokenizer=False)
    assert ("lm_head" in loaded.params) == ("tie_word_embeddings" in change)
    hf.save_folder(tmp_path / "export", source, loaded.config, loaded.params)
    got, expected = tensors(tmp_path / "export"), tensors(source)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert shards == sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    assert (len(shards) > 1) == ("max_shard_size" in change)


@functools.cache
def prefill_and_head(config):
    policy = make_policy(config)
    return jax.jit(policy.prefill), policy.head


@pytest.mark.parametrize("form", ["hub", "sharded"])
def test_transformers_loads_a_changed_export_and_agrees(tmp_path, form):
    source = reference.folder(tmp_path / "source", "gpt2", max_shard_size="20KB" if form == "sharded" else "1GB")
    if form == "hub":
        rename(source, as_on_the_hub)
    loaded = hf.load_folder(source, tokenizer=False)
    assert loaded.eos_ids == (5,) and loaded.pad_id == 0
    changed = jax.tree.map(lambda leaf: leaf * 1.1 + 0.01, loaded.params)
    hf.save_folder(tmp_path / "export", source, loaded.config, changed)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    tokens, mask = reference.unshared(*reference.group_batch(length=9))
    tokens, mask = tokens[:, :9], mask[:, :9]
    prefill, head = prefill_and_head(loaded.config)
    got = prefill({"params": changed}, tokens, mask).hidden @ head({"params": changed}).T
    with torch.no_grad():
        np.testing.assert_allclose(got, reference.logits(model, tokens, mask)[:, -1], atol=1e-4)


def keys_for(rows):
    return jax.random.split(jax.random.key(0), rows)


def test_greedy_tokens_are_those_of_transformers(source, loaded):
    """Left-padded prompts, through the same sampler."""
    tokens, mask = reference.group_batch()[:2]
    sample = make_sampler(
        make_policy(loaded.config), SamplingParams(2, 10, temperature=0.0), eos_ids=loaded.eos_ids, pad_id=0
    )
    samples = sample({"params": loaded.params}, tokens, mask, keys_for(3))
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    ids, attention = torch.tensor(tokens, dtype=torch.long), torch.tensor(mask, dtype=torch.long)
    with torch.no_grad():
        written = model.generate(ids, attention_mask=attention, do_sample=False, max_new_tokens=10, pad_token_id=0)
    expected = np.zeros((3, 10), np.int32)
    expected[:, : written.shape[1] - 6] = written[:, 6:]
    np.testing.assert_array_equal(samples.tokens, np.repeat(expected[:, None], 2, axis=1))


def test_sampled_logprobs_are_those_of_the_updates_forward(policy, variables):
    tokens, mask = reference.group_batch()[:2]
    sample = make_sampler(policy, SamplingParams(2, 5, temperature=1.3), eos_ids=tuple(range(0, 30, 2)), pad_id=0)
    samples = sample(variables, tokens, mask, keys_for(3))
    hidden = policy.forward_group(variables, tokens, mask, samples.tokens, samples.mask)
    logprobs, _ = token_logprobs(hidden, policy.head(variables), samples.tokens, temperature=1.3)
    drawn = np.asarray(samples.mask)
    assert len(set(drawn.sum(-1).ravel())) > 1
    np.testing.assert_allclose(samples.logprobs[drawn], logprobs[drawn], atol=1e-4)


def test_what_is_longer_than_the_positions_is_refused(policy, loaded):
    """63 and 1 tokens fit into 64 positions, and padding does not count."""
    variables = {"params": loaded.params}
    sample = make_sampler(policy, SamplingParams(1, 1), eos_ids=(5,), pad_id=0)
    tokens, mask = np.ones((1, 70), np.int32), np.arange(70)[None] >= 7
    assert sample(variables, tokens, mask, keys_for(1)).mask.all()
    mask = np.arange(70)[None] >= 6
    with pytest.raises(ValueError, match=r"at most 64 tokens.*prompt of 64 tokens and max_new_tokens = 1"):
        sample(variables, tokens, mask, keys_for(1))
    functions = make_policy(loaded.config)
    completion = np.ones((1, 1, 1), np.int32), np.ones((1, 1, 1), bool)
    with pytest.raises(ValueError, match="at most 64 tokens"):
        functions.forward_group(variables, tokens, mask, *completion)
    with pytest.raises(ValueError, match="at most 64 tokens"):
        functions.prefill(variables, tokens, np.ones((1, 70), bool))
    # Under jit the mask is not known: what cannot be is not a number, rather than wrong.
    assert bool(jnp.isnan(policy.prefill(variables, tokens, np.ones((1, 70), bool)).hidden).all())


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--data.max_prompt_tokens", "57"], ["data.max_prompt_tokens = 57", "65 tokens", "64 only"]),
        (
            ["--data.max_prompt_tokens", "56", "--policy.lora.rank", "2", "--policy.lora.targets", '["q_proj"]'],
            ["policy.lora: targets", "c_attn", "q_proj"],
        ),
    ],
    ids=["room", "targets"],
)
def test_the_command_says_so_before_anything_runs(tmp_path, source, capsys, options, messages):
    shutil.copytree(source, tmp_path / "policy")
    tiny_models.chat_tokenizer().save_pretrained(tmp_path / "policy")
    given = ["--task", "text", "--policy.path", str(tmp_path / "policy"), "--sampling.max_new_tokens", "8"]
    assert train.main([*given, "--run_dir", str(tmp_path / "run"), *options]) == 2
    shown = "".join(capsys.readouterr())
    assert all(message in " ".join(shown.split()) for message in messages), shown
    assert "Traceback" not in shown


def test_bfloat16_compute_is_close(policy, loaded):
    """Norms, scores and softmax stay float32."""
    tokens, mask = reference.group_batch()[:2]
    exact = policy.prefill({"params": loaded.params}, tokens, mask).hidden
    half = make_policy(loaded.config, compute_dtype="bfloat16").prefill({"params": loaded.params}, tokens, mask)
    assert half.hidden.dtype == half.keys[0].dtype == jnp.bfloat16
    assert 0 < np.median(np.abs(half.hidden.astype(jnp.float32) - exact)) < 0.05


def test_gpt2_small_has_its_published_shape():
    config = GPT2Config.from_hf(SMALL)
    shapes = jax.eval_shape(lambda key: init_variables(config, key), jax.random.key(0))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 124_439_808
    lora = LoraConfig(rank=4, targets=GPT2_PROJECTIONS)
    adapters = jax.eval_shape(lambda key: init_variables(config, key, lora=lora)["lora"], jax.random.key(0))
    assert adapters["layers"]["c_attn"]["b"].shape == (12, 4, 3 * 768)
    assert adapters["layers"]["mlp_c_proj"]["a"].shape == (12, 3072, 4)


def test_fresh_weights_are_as_the_paper_says():
    config = GPT2Config.from_hf(SMALL | dict(vocab_size=64, n_embd=64, n_head=4, n_layer=8, initializer_range=0.2))
    params = jax.jit(lambda key: init_variables(config, key)["params"])(jax.random.key(0))
    stds = {name: float(jnp.std(params["layers"][name]["kernel"])) for name in GPT2_PROJECTIONS}
    expected = dict(c_attn=0.2, c_fc=0.2, attn_c_proj=0.05, mlp_c_proj=0.05)
    assert stds == pytest.approx(expected, rel=0.05)
    assert float(jnp.std(params["embed_positions"])) == pytest.approx(0.2, rel=0.05)
    assert float(jnp.abs(params["layers"]["ln_1"]["scale"] - 1).max()) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(add_cross_attention=True), "add_cross_attention=True"),
        (dict(activation_function="quick_gelu"), "activation_function.*quick_gelu"),
        (dict(pruned_heads={"0": [1]}), "pruned_heads"),
        (dict(quantization_config=dict(bits=4)), "quantization_config"),
        (dict(n_head=5), "n_head, got 768 and 5"),
        (dict(n_layer=None), "lacks n_layer"),
        (dict(n_positions=0), "max_positions"),
        (dict(n_inner="wide"), "intermediate_size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_fields_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        GPT2Config.from_hf(SMALL | change)


def test_names_that_transformers_also_takes():
    renamed = dict(
        model_type="gpt2",
        vocab_size=50257,
        max_position_embeddings=1024,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
    )
    dropouts = dict(attn_pdrop=0.3, embd_pdrop=0.3, resid_pdrop=0.3, n_inner=3072, n_ctx=1024)
    assert GPT2Config.from_hf(renamed) == GPT2Config.from_hf(SMALL | dropouts)


def test_a_folder_that_cannot_be_read_gives_one_line(tmp_path):
    folder = reference.folder(tmp_path / "source", "gpt2")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"add_cross_attention": True}))
    with pytest.raises(UserError, match=r"add_cross_attention.*gpt2"):
        hf.load_folder(folder, tokenizer=False)
    (folder / "config.json").write_text(json.dumps(raw))
    rename(
        folder, lambda stored: {k: v for k, v in stored.items() if "h.1.mlp.c_fc" not in k} | {"extra": torch.ones(1)}
    )
    with pytest.raises(UserError, match=r"h\.1\.mlp\.c_fc\.weight is missing.*extra is unexpected"):
        hf.load_folder(folder, tokenizer=False)
