"""Adapters in the format of the PEFT library: a folder of adapter_config.json and adapter_model.safetensors.

``a`` [in, rank] and ``b`` [rank, out] of a layer are PEFT's ``lora_A.weight`` [r, in] and ``lora_B.weight`` [out, r],
named after the module in transformers' model: ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``. The
same holds for GPT-2, whose Conv1D modules store their own weight the other way round (``fan_in_fan_out``).
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from grpo_jax.errors import UserError
from grpo_jax.models.families import ModelConfig, family_of
from grpo_jax.models.hf.atomic import new_folder, refuse_foreign
from grpo_jax.models.hf.weights import TensorFiles, listed, read_json, shapes
from grpo_jax.models.lora import LoraConfig, check_targets

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_ROOT = "base_model.model."
_FACTORS = {"a": "lora_A", "b": "lora_B"}
_READ = ("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "init_lora_weights")
# Says where an adapter came from or how it was trained (dropout), or is of another engine; changes no result.
_SILENT = (
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "task_type"),
)
# Starts that leave the base as it is; the others (PiSSA, OLoRA, CorDA, LoftQ …) take the adapter out of its weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def save_adapters(
    folder: str | Path, adapters: Mapping[str, Any], lora: LoraConfig, config: ModelConfig, *, base: str
) -> None:
    """Write adapters that ``peft.PeftModel.from_pretrained`` loads onto the base model.

    The folder appears at once when it is complete, replacing an earlier one.

    Args:
        folder: where to write.
        adapters: the ``lora`` collection (``lora.init_adapters``); written as float32.
        lora: its configuration.
        config: the decoder's.
        base: name of the base model, a folder or a hub id; PEFT's auto classes load it.

    Raises:
        UserError: if the folder cannot be written or is in use for something else.
    """
    folder = Path(folder)
    refuse_foreign(folder, CONFIG, "a folder of adapters")
    tensors = {}
    for name in lora.targets:
        for factor in _FACTORS:
            stacked = np.asarray(jax.device_get(adapters["layers"][name][factor]), np.float32)
            for layer, value in enumerate(stacked):
                tensors[_tensor(config, _prefix(config), layer, name, factor)] = np.ascontiguousarray(value.T)
    try:
        with new_folder(folder) as work:
            described = json.dumps(_describe(lora, config, base), indent=2)
            (work / CONFIG).write_text(described + "\n", encoding="utf-8")
            save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the adapters to {folder}: {error}") from error


def load_adapters(folder: str | Path, config: ModelConfig) -> tuple[LoraConfig, dict[str, Any]]:
    """Read adapters that PEFT, or ``save_adapters``, wrote for this decoder.

    Args:
        folder: holds ``adapter_config.json`` and ``adapter_model.safetensors``.
        config: the decoder's.

    Returns:
        Rank, alpha and targets, and the ``lora`` collection: per target ``a`` [layers, in, rank] and
        ``b`` [layers, rank, out], float32.

    Raises:
        UserError: naming what is missing or unsupported: DoRA, rank-stabilised scales, biases, ranks that differ
            between modules, adapters on other modules or in a part of the layers.
    """
    folder = Path(folder).expanduser()
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} has no {CONFIG}: give the folder of a PEFT adapter (`hf download ID --local-dir …`)")
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}: only safetensors are read; save the adapter again with PEFT")
    raw, files = read_json(folder / CONFIG), TensorFiles([folder / WEIGHTS])
    try:
        _refuse_unsupported(raw)
        prefix = _found_prefix(config, files.names)
        lora = LoraConfig(raw.get("r"), float(raw.get("lora_alpha") or 0), _targets(raw, config, prefix))
        check_targets(lora, family_of(config).projections, config.model_type)
        return lora, _read(files, lora, config, prefix)
    except (ValueError, TypeError, re.error) as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error


def _describe(lora: LoraConfig, config: ModelConfig, base: str) -> dict[str, Any]:
    """The contents of adapter_config.json."""
    naming = family_of(config).naming
    modules = naming.modules
    if naming.beside:  # a list would also reach modules of the same names in the vision tower
        chosen = "|".join(re.escape(modules[name]) for name in lora.targets)
        targets: str | list[str] = rf"{re.escape(_prefix(config))}layers\.\d+\.({chosen})"
    else:
        tails = [module.rpartition(".")[2] for module in modules.values()]
        chosen = {name: modules[name].rpartition(".")[2] for name in lora.targets}
        targets = [tail if tails.count(tail) == 1 else modules[name] for name, tail in chosen.items()]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "fan_in_fan_out": not naming.transposed,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _prefix(config: ModelConfig) -> str:
    """Where transformers' model keeps its language model; the base's folder may name its tensors otherwise."""
    return family_of(config).naming.prefixes[0]


def _module(config: ModelConfig, prefix: str, layer: int, name: str) -> str:
    naming = family_of(config).naming
    return f"{prefix}{naming.layers}.{layer}.{naming.modules[name]}"


def _tensor(config: ModelConfig, prefix: str, layer: int, name: str, factor: str) -> str:
    return f"{_ROOT}{_module(config, prefix, layer, name)}.{_FACTORS[factor]}.weight"


def _found_prefix(config: ModelConfig, names: Mapping[str, Any]) -> str:
    """The prefix that an adapter's tensors use: that of the whole model, or of a part that was adapted alone."""
    naming = family_of(config).naming
    for prefix in naming.prefixes:
        if any(name.startswith(f"{_ROOT}{prefix}{naming.layers}.") for name in names):
            return prefix
    raise ValueError(f"its tensors are not those of a {config.model_type!r} model, such as {next(iter(names), 'none')}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Every field that changes what the adapters compute is honoured or refused by name."""
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {raw.get('peft_type')!r}")
    if raw.get("init_lora_weights") not in _PLAIN_STARTS:
        raise ValueError(
            f"init_lora_weights={raw['init_lora_weights']!r} changes the base's weights, which is not supported: "
            "convert it to plain LoRA with PEFT (save_pretrained's path_initial_model_for_weight_conversion)"
        )
    for name, value in raw.items():
        if name not in _READ + _SILENT and value not in (None, False, "none", "", [], {}):
            raise ValueError(f"{name}={value!r} is not supported")


def _targets(raw: Mapping[str, Any], config: ModelConfig, prefix: str) -> tuple[str, ...]:
    """The projections that target_modules (list of endings, pattern, or "all-linear") reaches, by PEFT's own rules."""

    def reached(wanted: Any, module: str) -> bool:
        if isinstance(wanted, str):
            return wanted.lower() == "all-linear" or re.fullmatch(wanted, module) is not None
        return any(module == ending or module.endswith(f".{ending}") for ending in wanted or ())

    targets, projections = [], tuple(family_of(config).projections)
    for name in projections:
        modules = [_module(config, prefix, layer, name) for layer in range(config.num_layers)]
        adapted = [
            reached(raw.get("target_modules"), module) and not reached(raw.get("exclude_modules"), module)
            for module in modules
        ]
        if any(adapted) and not all(adapted):
            raise ValueError(f"target_modules reaches {name} in a part of the layers, which is not supported")
        targets += [name] * all(adapted)
    if not targets:
        raise ValueError(f"target_modules={raw.get('target_modules')!r} reaches none of {projections}")
    return tuple(targets)


def _read(files: TensorFiles, lora: LoraConfig, config: ModelConfig, prefix: str) -> dict[str, Any]:
    """The ``lora`` collection; what does not fit is named before anything is read."""
    kernels, layers = shapes(config)["layers"], range(config.num_layers)
    expected = {}
    for name in lora.targets:
        width_in, width_out = kernels[name]["kernel"].shape[1:]
        for layer in layers:
            expected[_tensor(config, prefix, layer, name, "a")] = (lora.rank, width_in)
            expected[_tensor(config, prefix, layer, name, "b")] = (width_out, lora.rank)
    problems = [f"{name} is missing" for name in expected if name not in files.names]
    problems += [f"{name} is unexpected" for name in files.names if name not in expected]
    problems += [
        f"{name} has shape {files.shape(name)}, expected {shape}"
        for name, shape in expected.items()
        if name in files.names and files.shape(name) != shape
    ]
    if problems:
        raise ValueError(f"the weights beside it do not fit: {listed(problems)}")

    def stacked(name: str, factor: str) -> jax.Array:
        read = (files.read_finite(_tensor(config, prefix, layer, name, factor), np.float32) for layer in layers)
        return jnp.array(np.stack([value.T for value in read]))

    return {"layers": {name: {factor: stacked(name, factor) for factor in _FACTORS} for name in lora.targets}}
