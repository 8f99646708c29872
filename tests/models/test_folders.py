"""Hugging Face folders: bit-equal round trips, preserved files, and one clear error for each flaw."""

import json
import shutil

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from support import tiny_models  # noqa: E402
from support import torch_reference as reference  # noqa: E402
from support.folders import load_folder  # noqa: E402

from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.models.hf import folder as hf  # noqa: E402
from grpo_jax.models.policy import Policy, load_policy  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_tensors(folder, other):
    got, expected = tensors(folder), tensors(other)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.fixture
def qwen(tmp_path):
    return tiny_models.causal_lm(tmp_path / "qwen", "qwen2")


def edit_json(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def as_on_the_hub(folder):
    """openai-community/gpt2: no prefix, and the causal masks as tensors."""
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors(folder).items()}
    for layer in range(2):
        bare[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(1, 1, 64, 64))
        bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("architecture", "dtype", "param_dtype", "changes"),
    [
        ("qwen2", "float32", "float32", dict(tie_word_embeddings=True)),
        ("qwen3", "bfloat16", "float32", dict(max_shard_size="20KB")),
        ("llama", "float16", "float32", dict(attention_bias=True, mlp_bias=True)),
        ("llama", "bfloat16", None, {}),
        ("olmo2", "float32", "float32", {}),
        ("phi3", "float32", "float32", dict(max_shard_size="20KB")),
        ("gemma2", "bfloat16", "float32", dict(tie_word_embeddings=True)),
        ("gemma3_text", "float32", "float32", dict(tie_word_embeddings=False)),
        ("gpt2", "float32", "float32", dict(tie_word_embeddings=True)),
        ("gpt2", "float16", "float32", dict(tie_word_embeddings=False)),
    ],
)
def test_round_trip_is_bit_equal(tmp_path, architecture, dtype, param_dtype, changes):
    source = reference.folder(tmp_path / "source", architecture, dtype=DTYPES[dtype], **changes)
    if changes == dict(tie_word_embeddings=True) and architecture == "gpt2":
        as_on_the_hub(source)
    loaded = load_folder(source, param_dtype=param_dtype, tokenizer=False)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)} == {param_dtype or dtype}
    hf.save_folder(tmp_path / "export", source, loaded.config, loaded.params)
    assert_same_tensors(tmp_path / "export", source)
    assert ("lm_head" in loaded.params) == (not changes.get("tie_word_embeddings", False))
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert shards == sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    assert len(shards) > 1 or "max_shard_size" not in changes


def assert_same_logits(model, config, params, tokens):
    policy, mask = Policy(config), np.ones(tokens.shape, bool)
    logits = jax.jit(lambda variables: policy.prefill(variables, tokens, mask).hidden @ policy.head(variables).T)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(tokens, dtype=torch.long)).logits[:, -1]
    np.testing.assert_allclose(logits({"params": params}), expected, atol=1e-4)


SOURCES = {
    "qwen2": lambda folder: tiny_models.causal_lm(folder, "qwen2", max_shard_size="20KB"),
    "qwen2_vl": tiny_models.qwen_vl,
    "gpt2": lambda folder: as_on_the_hub(reference.folder(folder, "gpt2")),
}


@pytest.mark.parametrize("architecture", SOURCES)
def test_transformers_loads_a_changed_export_and_agrees(tmp_path, architecture):
    """Trained weights, the source's tokenizer and ids, and for Qwen2-VL its vision tower as it was."""
    source, chat = SOURCES[architecture](tmp_path / "source"), architecture != "gpt2"
    loaded = load_folder(source, tokenizer=chat)
    assert (loaded.eos_ids, loaded.pad_id) == (((258, 256), 256) if chat else ((5,), 0))
    changed = jax.tree.map(lambda leaf: leaf * np.float32(1.2) + np.float32(0.01), jax.device_get(loaded.params))
    hf.save_folder(tmp_path / "export", source, loaded.config, changed)

    seeing = architecture == "qwen2_vl"
    auto = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "export", dtype="float32")
    tokens = np.random.default_rng(0).integers(0, loaded.config.vocab_size - 70, (2, 7)).astype(np.int32)
    assert_same_logits(model, loaded.config, changed, tokens)
    if chat:
        assert model.generation_config.eos_token_id == [258, 256]
        assert hf.load_tokenizer(tmp_path / "export").chat_template == loaded.tokenizer.chat_template
    before, after = tensors(source), tensors(tmp_path / "export")
    vision = [name for name in before if "visual" in name]
    assert bool(vision) == seeing and all(torch.equal(before[name], after[name]) for name in vision)


def test_a_single_file_beside_an_older_index_is_what_transformers_loads(tmp_path):
    source = reference.folder(tmp_path / "source", "qwen2", max_shard_size="20KB")
    shards = {path: path.read_bytes() for path in source.glob("*.safetensors")}
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    torch.nn.init.ones_(model.model.norm.weight)
    model.save_pretrained(source)  # removes the shards, not their index
    for path, content in shards.items():
        path.write_bytes(content)
    loaded = load_folder(source, tokenizer=False)
    np.testing.assert_array_equal(loaded.params["norm"]["scale"], 1)
    hf.save_folder(tmp_path / "export", source, loaded.config, loaded.params)
    assert sorted(path.name for path in (tmp_path / "export").glob("*.safetensors*")) == ["model.safetensors"]


def test_what_is_loaded_is_donated_to_an_update(qwen):
    """Its memory is the result's: not the case for arrays that alias the host's."""
    params = load_policy(qwen).params

    def pointers(tree):
        return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}

    before = pointers(params)
    assert pointers(jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(params)) == before


def test_qwen2_vl_in_the_nested_naming(tmp_path):
    """`model.language_model.*` and `model.visual.*`, as some newer folders name them."""
    source = tiny_models.qwen_vl(tmp_path / "source")
    renamed = {}
    for name, tensor in tensors(source).items():
        name = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        renamed[f"model.{name}" if name.startswith("visual.") else name] = tensor
    shutil.copytree(source, tmp_path / "nested")
    save_file(renamed, tmp_path / "nested" / "model.safetensors", metadata={"format": "pt"})
    flat, nested = (load_folder(tmp_path / name, tokenizer=False) for name in ("source", "nested"))
    jax.tree.map(np.testing.assert_array_equal, flat.params, nested.params)
    hf.save_folder(tmp_path / "export", tmp_path / "nested", nested.config, nested.params)
    assert_same_tensors(tmp_path / "export", tmp_path / "nested")
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "export")
    expected = transformers.AutoModelForImageTextToText.from_pretrained(source)
    for got, want in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(got, want)


def test_an_export_says_its_dtype_where_the_source_says_none(tmp_path):
    source = reference.folder(tmp_path / "source", "qwen2", dtype=torch.bfloat16)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({name: config[name] for name in config if "dtype" not in name}))
    loaded = load_folder(source, tokenizer=False)
    hf.save_folder(tmp_path / "export", source, loaded.config, loaded.params, dtype="float32")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["torch_dtype"] == "float32"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert model.dtype == torch.float32


def test_a_repeated_tied_head_stays_tied(tmp_path, qwen):
    """Some folders store the embedding a second time as lm_head."""
    source = tiny_models.causal_lm(tmp_path / "tied", "qwen2", tie_word_embeddings=True)
    stored = tensors(source)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    loaded = load_folder(source)
    hf.save_folder(tmp_path / "export", source, loaded.config, jax.tree.map(lambda x: np.asarray(x) + 1, loaded.params))
    exported = tensors(tmp_path / "export")
    assert torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])
    stored["lm_head.weight"] += 1
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        load_folder(source)


def test_end_ids_fall_back_to_config_and_tokenizer(qwen):
    edit_json(qwen / "generation_config.json", eos_token_id=9, pad_token_id=3)
    loaded = load_folder(qwen, tokenizer=False)
    assert loaded.eos_ids == (9,) and loaded.pad_id == 3
    (qwen / "generation_config.json").unlink()
    edit_json(qwen / "config.json", eos_token_id=[11, 12, 99999], pad_token_id=None)
    loaded = load_folder(qwen, tokenizer=False)
    assert loaded.eos_ids == (11, 12) and loaded.pad_id == 11
    edit_json(qwen / "config.json", eos_token_id=None)
    assert load_folder(qwen).eos_ids == (258,)
    with pytest.raises(UserError, match="eos_token_id"):
        load_folder(qwen, tokenizer=False)


def test_an_export_replaces_an_older_one_and_nothing_else(tmp_path, qwen):
    # Code and other weights are not copied.
    others = ("modeling.py", "training.bin", "pytorch_model.bin.index.json", "adapter_config.json")
    for name in ("LICENSE", *others):
        (qwen / name).write_text("{}")
    loaded = load_folder(qwen)
    target = tmp_path / "runs" / "policy"
    hf.save_folder(target, qwen, loaded.config, loaded.params)
    names = {path.name for path in target.iterdir()}
    assert {"LICENSE", "config.json", "tokenizer.json", "generation_config.json"} <= names - {*others} == names
    hf.save_folder(target, qwen, loaded.config, jax.tree.map(np.zeros_like, loaded.params))
    assert not tensors(target)["model.norm.weight"].any()
    assert [path.name for path in target.parent.iterdir()] == ["policy"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="else than an exported policy"):
        hf.save_folder(tmp_path / "notes", qwen, loaded.config, loaded.params)
    (target / ".git").mkdir()
    with pytest.raises(UserError, match="else than an exported policy"):
        hf.save_folder(target, qwen, loaded.config, loaded.params)
    assert (target / ".git").is_dir()
    with pytest.raises(UserError, match="made from"):
        hf.save_folder(qwen, qwen, loaded.config, loaded.params)


def test_a_failed_export_leaves_the_older_one(tmp_path, qwen, monkeypatch):
    loaded = load_folder(qwen)
    hf.save_folder(tmp_path / "export", qwen, loaded.config, loaded.params)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("grpo_jax.models.hf.weights.save_file", full)
    with pytest.raises(UserError, match="No space left"):
        hf.save_folder(tmp_path / "export", qwen, loaded.config, loaded.params)
    assert_same_tensors(tmp_path / "export", qwen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "qwen"]


def test_float16_overflow_is_refused(tmp_path):
    source = reference.folder(tmp_path / "source", "llama", dtype=torch.float16)
    loaded = load_folder(source, tokenizer=False)
    params = jax.tree.map(lambda x: np.asarray(x) * np.float32(1e6), loaded.params)
    with pytest.raises(UserError, match="float16"):
        hf.save_folder(tmp_path / "export", source, loaded.config, params)
    assert not (tmp_path / "export").exists()


def wrong_tensors(folder):
    stored = tensors(folder)
    stored["model.norm.weight"] = torch.ones(7)
    stored["model.layers.0.mlp.up_proj.weight"] = stored["model.layers.0.mlp.up_proj.weight"].int()
    stored["model.layers.9.mlp.up_proj.weight"] = stored.pop("model.layers.1.mlp.up_proj.weight")
    save_file(stored, folder / "model.safetensors")


def no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def writes(name, content):
    """Return the function that writes this into a file of a folder."""
    return lambda folder: (folder / name).write_bytes(content(folder / name) if callable(content) else content)


def only_index(shard):
    """Return the function that replaces a folder's weights by an index that names this shard."""
    content = json.dumps({"weight_map": {"a": shard}})
    return lambda folder: (folder / WEIGHTS).rename(folder / INDEX).write_text(content)


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DAMAGES = {
    "truncated": (writes(WEIGHTS, lambda path: path.read_bytes()[:-100]), ["truncated", WEIGHTS]),
    "pickle": (lambda folder: (folder / WEIGHTS).rename(folder / "a.bin"), ["a.bin", "safetensors"]),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ["has no model.safetensors"]),
    "tensors": (
        wrong_tensors,
        ["model.layers.1.mlp.up_proj.weight is missing", "up_proj.weight has dtype I32, expected", "; and 2 more"],
    ),
    "shape": (
        lambda folder: save_file(tensors(folder) | {"model.norm.weight": torch.ones(7)}, folder / WEIGHTS),
        ["model.norm.weight has shape (7,), expected (32,)"],
    ),
    "no shard": (only_index("model-2.safetensors"), ["model-2.safetensors"]),
    "shard outside": (only_index("../other.safetensors"), ["../other.safetensors"]),
    "model_type": (lambda folder: edit_json(folder / "config.json", model_type="mamba"), ["mamba", "qwen2"]),
    "config": (writes("config.json", b"{"), ["config.json"]),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "no tokenizer": (no_tokenizer, ["tokenizer"]),
    "tokenizer": (writes("tokenizer.json", b'{"version": "1.0"}'), ["tokenizer"]),
}


@pytest.mark.parametrize(("damage", "messages"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_folders_give_one_clear_line(qwen, damage, messages):
    damage(qwen)
    with pytest.raises(UserError) as caught:
        load_folder(qwen)
    assert all(message in str(caught.value) for message in [*messages, str(qwen)]), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("model.norm.weight", float("nan"), torch.float32),
        ("model.layers.1.mlp.up_proj.weight", float("inf"), torch.bfloat16),
    ],
)
def test_weights_that_are_not_finite_are_refused(qwen, name, value, dtype):
    stored = {key: tensor.to(dtype) for key, tensor in tensors(qwen).items()}
    stored[name].view(-1)[3] = value
    save_file(stored, qwen / "model.safetensors")
    for param_dtype in (None, "float32", "float16"):
        with pytest.raises(UserError, match=f"{name} holds NaN or infinite values, .*: copy .* again"):
            load_folder(qwen, param_dtype=param_dtype, tokenizer=False)


def test_weights_that_a_dtype_cannot_hold_are_refused(qwen):
    stored = tensors(qwen)
    stored["model.norm.weight"][0] = 1e5
    save_file(stored, qwen / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight holds .* larger ones than float16 has"):
        load_folder(qwen, param_dtype="float16")
    assert load_folder(qwen, param_dtype="bfloat16").params["norm"]["scale"][0] > 9e4


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "smollm3"])
def test_a_tokenizer_is_of_the_class_that_transformers_chooses(tmp_path, model_type, name):
    tiny_models.chat_tokenizer().save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded, chosen = hf.load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(chosen) and loaded.init_kwargs == chosen.init_kwargs


def test_a_panic_in_a_tokenizer_is_one_line(qwen, monkeypatch):
    class PanicException(BaseException):
        """A panic of Rust, as Python sees it."""

    def panic(*_, **__):
        raise PanicException("index out of bounds: the len is 0 but the index is 7\n and where")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(UserError, match=r"cannot load the tokenizer in .*index is 7.*; copy its files again$"):
        load_folder(qwen)
