"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

``a`` [in, rank] and ``b`` [rank, out] of a layer are PEFT's ``lora_A.weight`` [r, in] and ``lora_B.weight`` [out, r].
Names follow the module in transformers' model: ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``. The
same holds for GPT-2, although its Conv1D modules store their own weight transposed (``fan_in_fan_out``).
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import product
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from grpo_jax.config.fields import require
from grpo_jax.config.sections import LoraSection
from grpo_jax.errors import UserError
from grpo_jax.models import hf_config
from grpo_jax.models.architectures import ModelConfig, architecture_of
from grpo_jax.models.hf.weights import TensorFiles, misfits, new_folder, read_json_file, shapes
from grpo_jax.models.hf_config import as_user_error
from grpo_jax.models.lora import LoraConfig, check_targets
from grpo_jax.models.variables import VISUAL, PyTree, Variables
from grpo_jax.models.vision.tower import TOWERS, tower_shapes

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model_name_or_path"
_ROOT = "base_model.model."
_FACTORS = {"a": "lora_A", "b": "lora_B"}
_READ = ("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "init_lora_weights")
# Fields about an adapter's origin, training (dropout) or another engine, which change no result.
_SILENT = (
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "task_type"),
)
# Initialisations that keep the base unchanged; others (PiSSA, OLoRA, CorDA, LoftQ …) subtract the adapter from it.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def lora_config(section: LoraSection, model: ModelConfig) -> LoraConfig | None:
    """Return the adapters' configuration, None if all weights are trained; UserError if they do not fit the model."""
    if section.path is not None:
        return load_adapters(section.path, model)[0]
    if section.rank == 0:
        return None
    projections = tuple(architecture_of(model).projections)
    words = f"false: this {model.model_type} has no vision tower"
    require(not section.vision or model.vision is not None, "policy.lora.vision", words, section.vision)
    with as_user_error("policy.lora", ValueError):
        tower = tuple(TOWERS[model.vision.model_type].projections) if section.vision else ()
        lora = LoraConfig(section.rank, section.alpha, tuple(section.targets) or projections, tower)
        check_targets(lora, projections, model.model_type)
        return lora


def save_adapters(folder: str | Path, adapters: Variables, lora: LoraConfig, config: ModelConfig, *, base: str) -> None:
    """Write adapters that ``peft.PeftModel.from_pretrained`` loads onto the base model.

    `adapters` are the ``lora`` collection (``lora.init_adapters``), written as float32. `base` is a folder or a hub id,
    which PEFT's auto classes load. The folder appears atomically and replaces an earlier one. UserError if it cannot be
    written or holds anything else.
    """
    tensors = {}
    for part in _parts(config):
        for name, factor in product(_targets_of(lora, part), _FACTORS):
            stacked = np.asarray(jax.device_get(_layers(adapters, part)[name][factor]), np.float32)
            for layer, value in enumerate(stacked):
                tensors[_tensor(part.module(layer, name), factor)] = np.ascontiguousarray(value.T)
    with new_folder(Path(folder), CONFIG, "a folder of adapters", "the adapters") as work:
        described = json.dumps(_describe(lora, config, base), indent=2)
        (work / CONFIG).write_text(described + "\n", encoding="utf-8")
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})


def load_adapters(folder: str | Path, config: ModelConfig) -> tuple[LoraConfig, dict[str, PyTree]]:
    """Read adapters that PEFT, or ``save_adapters``, wrote for the decoder of `config`.

    Returns their configuration, and the ``lora`` collection: per target ``a`` [layers, in, rank] and ``b`` [layers,
    rank, out], float32; those of a vision tower in ``visual``. UserError if a file is missing, or for an unsupported
    feature: DoRA, rank-stabilised scales, biases, ranks that differ between modules, adapters on other modules or on
    only some of the layers.
    """
    folder = Path(folder).expanduser()
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise UserError(f"{folder} has no {missing[0]}: give a folder that PEFT's save_pretrained wrote as safetensors")
    raw, files = read_json_file(folder / CONFIG), TensorFiles([folder / WEIGHTS])
    with as_user_error(str(folder / CONFIG), ValueError, TypeError, re.error):
        _refuse_unsupported(raw)
        parts = [_found(part, config, files.names) for part in _parts(config)]
        targets = [_targets(raw, part) for part in parts]
        projections = tuple(parts[0].modules)
        hf_config.expect(bool(targets[0]), "target_modules", f"some of {projections}", raw.get("target_modules"))
        tower = targets[1] if len(targets) > 1 else ()
        alpha = float(raw.get("lora_alpha", 8))
        lora = LoraConfig(rank=raw.get("r"), alpha=alpha, targets=targets[0], vision=tower)
        return lora, _read(files, lora, config, parts)


def _describe(lora: LoraConfig, config: ModelConfig, base: str) -> hf_config.ConfigJson:
    naming = architecture_of(config).naming
    if naming.beside:  # a list would also match the vision tower's modules of the same names
        parts = ((part, _targets_of(lora, part)) for part in _parts(config))
        targets: str | list[str] = "|".join(part.pattern(names) for part, names in parts if names)
    else:
        tails = {name: module.rpartition(".")[2] for name, module in naming.modules.items()}
        shared = [tail for tail, count in Counter(tails.values()).items() if count > 1]
        targets = [naming.modules[name] if tails[name] in shared else tails[name] for name in lora.targets]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE: base,
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


class _Part(NamedTuple):
    path: tuple[str, ...]  # its path in parameters and adapters
    prefixes: tuple[str, ...]  # possible prefixes of its modules; the first is that of transformers' own model
    modules: Mapping[str, str]  # projection → the rest of the module's name, with {} for the layer
    layers: int  # number of layers

    def module(self, layer: int, name: str) -> str:
        return f"{self.prefixes[0]}{self.modules[name].format(layer)}"

    def pattern(self, names: Iterable[str]) -> str:
        escaped = (re.escape(self.modules[name]).replace(re.escape("{}"), r"\d+") for name in names)
        return f"{re.escape(self.prefixes[0])}({'|'.join(escaped)})"


def _parts(config: ModelConfig) -> tuple[_Part, ...]:
    architecture, vision = architecture_of(config), config.vision
    naming = architecture.naming
    modules = {name: f"{naming.layers}.{{}}.{naming.modules[name]}" for name in architecture.projections}
    decoder = _Part((), naming.prefixes, modules, config.num_layers)
    if vision is None:
        return (decoder,)
    tower = TOWERS[vision.model_type]
    modules = {name: tower.names[f"layers/{name}"] for name in tower.projections}
    return decoder, _Part((VISUAL,), naming.beside[::-1], modules, vision.depth)


def _targets_of(lora: LoraConfig, part: _Part) -> tuple[str, ...]:
    return lora.vision if part.path else lora.targets


def _layers(tree: Variables, part: _Part) -> Variables:
    return reduce(lambda node, key: node[key], (*part.path, "layers"), tree)


def _tensor(module: str, factor: str) -> str:
    return f"{_ROOT}{module}.{_FACTORS[factor]}.weight"


def _found(part: _Part, config: ModelConfig, names: Iterable[str]) -> _Part:
    """Select the prefix of an adapter's tensors: that of the whole model, or of a part that was adapted alone."""
    names, start = list(names), next(iter(part.modules.values())).partition("{}")[0]
    for prefix in part.prefixes:
        if any(name.startswith(f"{_ROOT}{prefix}{start}") for name in names):
            return part._replace(prefixes=(prefix,))
    if part.path:
        return part
    raise ValueError(f"its tensors are not those of a {config.model_type!r} model, such as {next(iter(names), 'none')}")


def _refuse_unsupported(raw: hf_config.ConfigJson) -> None:
    """Honour or refuse by name every field that changes the adapters' results."""
    hf_config.expect(raw.get("peft_type") == "LORA", "peft_type", "'LORA'", raw.get("peft_type"))
    words = "plain LoRA (PEFT's save_pretrained converts it: path_initial_model_for_weight_conversion)"
    start = raw.get("init_lora_weights")
    hf_config.expect(start in _PLAIN_STARTS, "init_lora_weights", words, start)
    neutral = (False, "none", "", [], {})
    hf_config.refuse_changed(raw, {name: neutral for name in raw if name not in _READ + _SILENT}, "LORA")


def _targets(raw: hf_config.ConfigJson, part: _Part) -> tuple[str, ...]:
    """Return the projections that target_modules (suffixes, pattern, or "all-linear") matches, by PEFT's own rules."""

    def reached(endings: str | Sequence[str] | None, module: str) -> bool:
        if isinstance(endings, str):
            return endings.lower() == "all-linear" or re.fullmatch(endings, module) is not None
        return any(module == ending or module.endswith(f".{ending}") for ending in endings or ())

    targets, wanted = [], raw.get("target_modules")
    for name in part.modules:
        modules = [part.module(layer, name) for layer in range(part.layers)]
        adapted = [reached(wanted, module) and not reached(raw.get("exclude_modules"), module) for module in modules]
        whole = all(adapted) or not any(adapted)
        hf_config.expect(whole, "target_modules", f"{name} in all layers or in none", wanted)
        targets += [name] * all(adapted)
    return tuple(targets)


def _read(files: TensorFiles, lora: LoraConfig, config: ModelConfig, parts: Sequence[_Part]) -> dict[str, PyTree]:
    """Read the ``lora`` collection; first report all tensors that do not fit."""
    kernels = shapes(config) | ({VISUAL: tower_shapes(config.vision)} if config.vision else {})
    expected = {}
    for part in parts:
        for name, layer in product(_targets_of(lora, part), range(part.layers)):
            width_in, width_out = _layers(kernels, part)[name]["kernel"].shape[1:]
            module = part.module(layer, name)
            expected |= {_tensor(module, "a"): (lora.rank, width_in), _tensor(module, "b"): (width_out, lora.rank)}
    if problems := misfits(expected, files, [name for name in files.names if name not in expected]):
        raise ValueError(f"the weights beside it do not fit: {problems}")

    def stacked(part: _Part, name: str, factor: str) -> jax.Array:
        tensors = (_tensor(part.module(layer, name), factor) for layer in range(part.layers))
        return jnp.array(np.stack([files.read_finite(tensor, np.float32).T for tensor in tensors]))

    adapters = {}
    for part in parts:
        targets = _targets_of(lora, part)
        layers = {name: {factor: stacked(part, name, factor) for factor in _FACTORS} for name in targets}
        adapters |= {"layers": layers} if not part.path else {VISUAL: {"layers": layers}} if layers else {}
    return adapters
