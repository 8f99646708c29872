"""Read and write Hugging Face folders of policies. Only safetensors; no code of a folder is ever run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from grpo_jax.errors import UserError, one_line, short_name, short_repr
from grpo_jax.models.architectures import ModelConfig, read_model_config
from grpo_jax.models.hf.chat import Tokenizer
from grpo_jax.models.hf.weights import new_folder, read_json_file, read_params, weight_files, write_params
from grpo_jax.models.hf_config import ConfigJson, as_user_error, expect, failures_named
from grpo_jax.models.variables import PyTree, Variables, copied

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
READ_FILES = (*_TOKENIZER_FILES, "config.json", "generation_config.json", "chat_template.json", "chat_template.jinja")
_TOKENIZERS = {
    ("llama", "GPT2Tokenizer"): "GPT2TokenizerFast",
    ("llama", "PreTrainedTokenizerFast"): "PreTrainedTokenizerFast",
    ("llama", "TokenizersBackend"): "PreTrainedTokenizerFast",
    ("qwen2", "Qwen2Tokenizer"): "Qwen2TokenizerFast",
    ("qwen3", "Qwen2Tokenizer"): "Qwen2TokenizerFast",
}
"""AutoTokenizer's choices by model_type and tokenizer_class: it imports torch, which takes seconds."""
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")


class PolicyFolder(NamedTuple):
    """A policy's folder, without weights."""

    config: ModelConfig
    tokenizer: Tokenizer  # None if not requested
    eos_ids: tuple[int, ...]  # every token id that ends a completion
    pad_id: int  # the first of `eos_ids` if the folder names none
    path: Path
    name: str  # the hub id, or the folder's absolute path


def read_folder(folder: str | Path, *, tokenizer: bool = True) -> PolicyFolder:
    """Read a local folder or hub id of one of `models.architectures`, without its weights."""
    name, folder = str(folder), resolve_folder(folder)
    name = str(folder.resolve()) if Path(name).expanduser().is_dir() else name
    require_folder(folder)
    raw = read_json_file(folder / "config.json")
    config = model_config(folder, raw)
    loaded = load_tokenizer(folder) if tokenizer else None
    eos_ids, pad_id = _special_ids(folder, raw, config.vocab_size, loaded)
    return PolicyFolder(config, loaded, eos_ids, pad_id, folder, name)


def load_weights(
    read: PolicyFolder,
    *,
    param_dtype: str | None = "float32",
    put: Callable[[PyTree], PyTree] | None = None,
    tower: bool = False,
) -> dict[str, PyTree]:
    """Load the parameters of a `read_folder` result, or those of its vision tower as ``{"visual": parameters}``.

    A `param_dtype` of None keeps the folder's. `put` moves them from host memory to their devices; None copies them to
    the first.
    """
    dtype = None if param_dtype is None else jnp.dtype(param_dtype)
    with as_user_error(f"cannot load the policy in {read.path}", UserError):
        params = read_params(read.config, read.path, dtype, tower=tower)
    return (put or copied)(params)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load a folder's tokenizer with its chat template; UserError if it is missing or broken."""
    folder = resolve_folder(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(f"{folder} has no tokenizer; copy the model's tokenizer files into it")
    import transformers

    fields = {folder / "config.json": "model_type", folder / "tokenizer_config.json": "tokenizer_class"}
    with failures_named(f"cannot load the tokenizer in {folder}"):
        names = tuple(str(read_json_file(file).get(field)) for file, field in fields.items() if file.is_file())
        loader = getattr(transformers, _TOKENIZERS.get(names, "AutoTokenizer"))
        tokenizer = loader.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    path = folder / "chat_template.json"  # folders of 2024 store the template for pictures in a separate file
    if path.is_file():
        template = read_json_file(path).get("chat_template")
        with as_user_error(str(path), ValueError):
            expect(isinstance(template, str), "chat_template", "text", template)
        if "image" not in (getattr(tokenizer, "chat_template", None) or ""):
            tokenizer.chat_template = template
    return tokenizer


def save_folder(
    folder: str | Path, source_folder: str | Path, config: ModelConfig, params: Variables, *, dtype: str | None = None
) -> None:
    """Write a folder that transformers loads: the source's with the policy's weights replaced.

    Configuration and tokenizer are the source's, and so is the vision tower unless `params` hold one (``visual``).
    `params` have merged adapters (``lora.merge``). Without `dtype` each tensor keeps the source's dtype. The folder
    appears atomically and replaces an earlier export; UserError if it holds anything else. Weights that are loaded and
    saved unchanged are bit-equal.
    """
    folder, source = Path(folder), resolve_folder(source_folder)
    if folder.exists() and folder.resolve() == source.resolve():
        raise UserError(f"the export would overwrite the folder it is made from, {folder}: choose another")
    with new_folder(folder, "config.json", "an exported policy", "the policy") as work:
        write_params(work, source, config, params, dtype and jnp.dtype(dtype))
        _copy_rest(source, work, dtype)


def resolve_folder(folder: str | Path) -> Path:
    """Find a folder by path or hub id; download safetensors, configurations and tokenizer unless cached."""
    name = str(folder)
    path = os.path.expanduser(name)
    if os.path.isdir(path):  # False too for strings with NUL, or too long for a path
        return Path(path)
    if _is_hub_id(name):
        return _from_hub(name)
    raise UserError(
        f"policy {short_repr(name, 120)} is not on this machine: give the path of a local folder with config.json, "
        "safetensors weights and tokenizer (for a model of the hub: `hf download ID --local-dir FOLDER`)"
    )


def require_folder(folder: str | Path) -> None:
    """Raise UserError unless a path is a model's local folder, or a hub id, which is not looked up."""
    if not os.path.isdir(os.path.expanduser(folder)) and _is_hub_id(str(folder)):
        return
    folder = resolve_folder(folder)
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} is a PEFT adapter: policy.lora.path takes it, and policy.path its base model")
    raise UserError(f"{folder} has no config.json; give the folder of a Hugging Face model")


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name, re.ASCII)) and not name.startswith(".")


def _from_hub(name: str) -> Path:
    """Return a hub id's folder in the local cache, after a download unless it is complete."""
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in (*_COPIED, ".safetensors")]

    def fetch(**where: bool) -> Path:
        folder = Path(snapshot_download(name, allow_patterns=patterns, **where))
        weight_files(folder)  # raises if the cache has only some of them
        return folder

    with suppress(Exception):  # not, or not completely, in the cache
        return fetch(local_files_only=True)
    try:
        return fetch()
    except Exception as error:  # offline, gated, unknown id, full disk: hub and transport raise many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"policy {name!r} is not a local folder, and the hub did not give it ({reason}): check the name and the "
            "connection, for a gated model accept its licence and run `hf auth login`, or give the path of a local "
            f"folder (`hf download {name} --local-dir FOLDER` makes one)"
        ) from error


def model_config(folder: Path, raw: ConfigJson) -> ModelConfig:
    """Return the decoder's config from a ``config.json``; UserError names an unsupported field."""
    kinds = ValueError, TypeError, LookupError, ArithmeticError, AttributeError
    with as_user_error(f"{folder}/config.json", *kinds):
        return read_model_config(raw)


def _special_ids(
    folder: Path, raw: ConfigJson, vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], int]:
    """Return EOS and padding ids: the generation config's, else the config's, else the tokenizer's."""
    path = folder / "generation_config.json"
    generation = read_json_file(path) if path.is_file() else {}
    nested = raw.get("text_config")
    sources = (generation, raw, nested if isinstance(nested, Mapping) else {})

    def is_id(value: object) -> bool:
        return type(value) is int and 0 <= value < vocab_size

    def find(field: str, fallback: object) -> tuple[int, ...]:
        for value in (*(source.get(field) for source in sources), fallback):
            ids = value if isinstance(value, list | tuple) else [value]
            if ids := tuple(dict.fromkeys(i for i in ids if is_id(i))):
                return ids
        return ()

    eos_ids = find("eos_token_id", getattr(tokenizer, "eos_token_id", None))
    if not eos_ids:
        raise UserError(f"{folder} names no end token: set eos_token_id in its generation_config.json")
    pad = getattr(tokenizer, "pad_token_id", None)
    pads = (pad,) if is_id(pad) else find("pad_token_id", None)
    return eos_ids, (pads or eos_ids)[0]


def _copy_rest(source: Path, work: Path, dtype: str | None) -> None:
    """Copy configurations and tokenizer, without code and without weights in other formats."""
    for path in source.iterdir():
        wanted = path.suffix in _COPIED or path.name.upper().startswith("LICENSE")
        if path.is_file() and wanted and not path.name.endswith((".index.json", "adapter_config.json")):
            shutil.copyfile(path, work / path.name)
    if dtype is not None:
        raw = read_json_file(work / "config.json")
        if not {"dtype", "torch_dtype"} & raw.keys():
            raw["torch_dtype"] = dtype  # the older name, which every version reads
        for fields in (raw, raw.get("text_config") or {}):
            for name in ("dtype", "torch_dtype"):
                if name in fields:
                    fields[name] = dtype
        (work / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def require_hub(repo: str) -> None:
    """Raise UserError for an invalid name, a missing login, or offline mode, without a network request."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import validate_repo_id

    problem = f"expected OWNER/NAME of a repository, got {short_name(repo)}"
    with suppress(ValueError):
        validate_repo_id(repo)
        _, _ = repo.split("/")  # a mistaken `true` would be a valid name otherwise
        problem = "" if get_token() else "not logged in to the hub; run `hf auth login`, or set HF_TOKEN"
        if constants.HF_HUB_OFFLINE:
            problem = "the hub is switched off here (HF_HUB_OFFLINE); unset it"
    if problem:
        raise UserError(f"push_to_hub: {problem}")


def write_card(folder: str | Path, *, base: str, adapters: bool = False) -> None:
    """Write the model card, README.md, of a trained policy's folder; it names `base` if that is a hub id."""
    from huggingface_hub import ModelCard, ModelCardData

    is_id = _is_hub_id(base) and not os.path.exists(base)
    data = ModelCardData(
        library_name="peft" if adapters else "transformers",
        base_model=base if is_id else None,
        tags=["grpo_jax", "reinforcement-learning"],
    )
    title = f"{'LoRA adapters' if adapters else 'A policy'} trained with grpo_jax{f' from {base}' if is_id else ''}"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {title}\n").save(Path(folder) / "README.md")


def push_folder(folder: str | Path, repo: str, *, private: bool = False) -> str:
    """Upload a folder as one commit, in place of older weights, to a repository "owner/name"; returns its URL."""
    require_hub(repo)
    from huggingface_hub import HfApi

    try:
        api = HfApi(library_name="grpo_jax")
        address = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(address.repo_id).private:
            raise ValueError(f"{repo} is there already and public: make it private on the hub")
        sent = {"repo_id": address.repo_id, "folder_path": str(folder), "commit_message": "Trained by grpo_jax"}
        api.upload_folder(**sent, delete_patterns=["model*.safetensors*", "adapter_*"])  # of an earlier push
    except Exception as error:  # hub, HTTP and network libraries raise their own types
        again = shlex.join(["hf", "upload", repo, str(folder), ".", *(["--private"] if private else [])])
        reason = one_line(error) or type(error).__name__
        raise UserError(f"push_to_hub: {reason}; {folder} is complete, to push it again: {again}") from error
    return str(address)
