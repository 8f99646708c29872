"""Makes the parts that a config names: policy, prompts, judges. Shared by the commands, which alone know them all."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.models.adapters import first_adapters, lora_config
from grpo_jax.config import Config, MeshSection, RewardSection, from_dict
from grpo_jax.errors import UserError
from grpo_jax.rollout.environment import make_environment
from grpo_jax.models.sharding import gather, make_mesh, over_prompts, place, shard_policy
from grpo_jax.rollout.pipeline import StageError
from grpo_jax.tasks.recommendation.parts import Recommendation, load_recommendation, make_new_policy
from grpo_jax.tasks.recommendation.parts import make_environment as make_recommendation
from grpo_jax.rollout.rollout import Environment
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.sampling.sampler import SamplingParams, make_sampler
from grpo_jax.training.trainer import trained_collections
from grpo_jax.models.value_head import VALUE, init_value_head

Say = Callable[..., None]


class Parts(NamedTuple):
    """Everything a config names, loaded.

    Attributes:
        config: The config.
        policy: The policy's pure functions.
        loaded: Its folder as read: decoder config, tokenizer, special ids; the weights are in `variables`.
        lora: Adapters' config, or None.
        variables: The start, on the policy's device.
        prompts: Train, validation and test rows.
        environment: Encoding, rendering and scoring.
        sampler: Training's sampler, G completions.
        greedy_sampler: One greedy completion.
        evaluation_sampler: One sampled completion.
        allowed_tokens: bool [V], or None for all.
        weights: Weight of each reward by name.
        conditions: Conditions between rewards, by index.
        key: The run's key.
        timeout: Seconds a stage may spend on a chunk, or None.
        devices: Name of the device of each part.
        mesh: The policy's devices where there are several, else None.
        task: Data and retriever of a recommendation run, else None.
    """

    config: Config
    policy: Any
    loaded: Any
    lora: Any
    variables: dict[str, Any]
    prompts: Any
    environment: Environment
    sampler: Callable[..., Any]
    greedy_sampler: Callable[..., Any]
    evaluation_sampler: Callable[..., Any]
    allowed_tokens: np.ndarray | None
    weights: dict[str, float]
    conditions: tuple[Any, ...]
    key: jax.Array
    timeout: float | None
    devices: dict[str, str]
    mesh: Any = None
    task: Recommendation | None = None

    @property
    def test_rows(self) -> Sequence[Any]:
        """The held-out prompts that results are reported on."""
        count = self.config.evaluation.prompts
        return self.prompts.test[: count or None]

    @property
    def validation_rows(self) -> Sequence[Any]:
        """The held-out prompts that "best" is chosen on."""
        return self.prompts.validation[: self.config.evaluation.validation_prompts]


def guarded(function: Callable[[], Any], *, debug: bool = False) -> int:
    """Runs a command: a user's mistake or a failed judge is one line and exit code 2, an interrupt 130.

    Args:
        function: The command; an int it returns is the exit code.
        debug: Let tracebacks through.
    """
    try:
        result = function()
    except (UserError, StageError) as error:
        if debug or (isinstance(error, StageError) and error.stage == "sample"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return result if isinstance(result, int) else 0


def run_config(run_dir: str | Path) -> Config:
    """The config that a run directory was made with."""
    import yaml

    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise UserError(f"{run_dir}: no config.yaml there; give the run directory of a training run")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.get("task") == "cartpole":
            raise UserError(f"{run_dir}: a CartPole run has no language policy; its results are in summary.json")
        # The folder may have moved since.
        return dataclasses.replace(from_dict(values), run_dir=str(run_dir))
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def load_parts(
    config: Config,
    *,
    say: Say,
    prompts: Any = None,
    rewards: Sequence[Callable[..., Any]] | None = None,
) -> Parts:
    """Loads everything, one line per part.

    Args:
        config: Names the parts.
        say: say(name, detail) prints a line.
        prompts: A `PromptSet` or a list of prompts/records in place of data.prompts.
        rewards: Reward functions in place of those in the config, with weight 1 each.
    """
    if config.deterministic:
        _ask_for_determinism(torch_too=config.task == "prompt_enhancement")
    placement = _place(config, say)
    devices = _policy_devices(placement, config.policy.mesh)
    task = _load_task(config, prompts, say)
    loaded, policy, lora, variables, mesh = _load_policy(config, devices, say)
    if task is None:
        prompt_set = _load_prompts(config, prompts, say)
        environment, sections = make_environment(config, placement, loaded, prompt_set, rewards, own_bridges, say)
    else:
        prompt_set = _tell_prompts(config, config.recommendation.source, task.dataset.prompts, say)
        environment, sections = make_recommendation(config, loaded, task, rewards, say)
    allowed = allowed_tokens(config, loaded)

    def sampler(group_size: int, temperature: float) -> Callable[..., Any]:
        section = config.sampling
        restrict = {"top_k": section.top_k, "top_p": section.top_p, "min_p": section.min_p} if temperature else {}
        params = SamplingParams(group_size, section.max_new_tokens, temperature, **restrict)
        sample = make_sampler(policy, params, eos_ids=loaded.eos_ids, pad_id=loaded.pad_id, allowed_tokens=allowed)
        return lambda *given: gather(sample(*given), mesh)

    return Parts(
        config=config,
        policy=policy,
        loaded=loaded,
        lora=lora,
        variables=variables,
        prompts=prompt_set,
        environment=environment,
        sampler=sampler(config.sampling.group_size, config.sampling.temperature),
        greedy_sampler=sampler(1, 0.0),
        evaluation_sampler=sampler(1, config.sampling.temperature),
        allowed_tokens=allowed,
        weights={section.label: section.weight for section in sections},
        conditions=_conditions(sections),
        key=jax.random.key(config.seed),
        timeout=config.judge_timeout or None,
        devices={"policy": _listed(devices)} if placement is None else dataclasses.asdict(placement),
        mesh=mesh,
        task=task,
    )


def _load_task(config: Config, prompts: Any, say: Say) -> Recommendation | None:
    """Data and retriever of the recommendation task, and the folder of the policy that it may start from."""
    if config.task != "recommendation":
        return None
    if prompts is not None:
        raise UserError("prompts: a recommendation run takes its data from config.recommendation")
    task = load_recommendation(config, own_bridges(), say)
    if config.policy.path == "new":
        make_new_policy(config, task.dataset.catalogue, RunDirectory(config.run_dir).start)
    return task


def _ask_for_determinism(*, torch_too: bool) -> None:
    """Repeatable kernels on GPUs; must come before JAX's backend and torch's first use of cuBLAS."""
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
    if torch_too:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        import torch

        torch.use_deterministic_algorithms(True)


def _place(config: Config, say: Say) -> Any:
    if config.task != "prompt_enhancement":
        say("devices", f"policy on {_listed(_policy_devices(None, config.policy.mesh))}")
        return None
    bridges = own_bridges()
    placement_module = bridges("placement")
    section = config.devices
    count = config.policy.mesh.size
    placement, notes = placement_module.place(section.policy, section.renderer, section.scorer, policy_count=count)
    for note in [*notes, *placement_module.prepare_jax(placement)]:
        say("devices", note)
    return placement


def own_bridges() -> Callable[[str], Any]:
    """Imports modules of this project's `bridges` package; another distribution installs one of the same name."""
    import importlib

    try:
        package = importlib.import_module("bridges")
    except ImportError as error:
        raise UserError(f"the bridges package is missing ({error}); install grpo_jax again") from error
    if not getattr(package, "__grpo_jax__", False):
        raise UserError(
            f"{getattr(package, '__file__', 'bridges')} is another package called `bridges`, not grpo_jax's; uninstall "
            "it or put grpo_jax first on the path"
        )

    def load(name: str) -> Any:
        try:
            return importlib.import_module(f"bridges.{name}")
        except ModuleNotFoundError as error:
            extra = "recommendation" if name == "retrieval" else "diffusion"
            raise UserError(f'{error.name} is not installed; run pip install "grpo_jax[{extra}]"') from error

    return load


def _policy_devices(placement: Any, section: MeshSection) -> list[jax.Device]:
    """The JAX devices of the policy, as many as its mesh takes."""
    devices = jax.devices() if placement is None else own_bridges()("placement").policy_devices(placement)
    if len(devices) < section.size:
        raise UserError(
            f"policy.mesh: fsdp {section.fsdp} x tensor {section.tensor} takes {section.size} devices, but the policy "
            f"has {len(devices)} ({_listed(devices)}); make the mesh smaller (XLA_FLAGS="
            f"--xla_force_host_platform_device_count={section.size} shows JAX that many on a CPU, for a trial)"
        )
    return devices[: section.size]


def _listed(devices: Sequence[jax.Device]) -> str:
    return ", ".join(map(str, devices))


def _load_policy(config: Config, devices: Sequence[jax.Device], say: Say) -> tuple[Any, Any, Any, dict[str, Any], Any]:
    """The folder as read, functions, LoRA config, variables on the devices, and the mesh if they are several."""
    from grpo_jax.models import hf
    from grpo_jax.models.decoder import make_policy
    from grpo_jax.models.quantised import count_weights, quantise

    section = config.policy
    folder = section.path
    if folder == "miniature":
        folder = own_bridges()("miniature").path("policy")
    elif folder == "new":
        folder = RunDirectory(config.run_dir).start
    mesh = make_mesh(section.mesh.fsdp, section.mesh.tensor, devices) if section.mesh.size > 1 else None

    def put(tree: Any) -> Any:
        return jax.device_put(tree, devices[0]) if mesh is None else place(tree, mesh)

    dtype = section.frozen_dtype if section.lora.used else "float32"
    store = None if mesh is None else put
    if section.quantised != "none":
        store = partial(quantise, kind=section.quantised, device=devices[0])
    try:
        loaded = hf.load_folder(folder, param_dtype=dtype, put=store)
    except ValueError as error:  # a weight that does not divide
        raise UserError(f"policy.mesh: {error}") from error
    lora = lora_config(section.lora, loaded.config)
    policy = make_policy(
        loaded.config,
        compute_dtype=section.compute_dtype,
        remat=section.remat,
        lora=lora,
        spread=over_prompts(mesh),
    )
    _check_room(config, policy.max_positions)
    variables = {"params": put(loaded.params)}
    if lora is not None:
        variables["lora"] = put(first_adapters(section.lora, lora, loaded.config, variables["params"], config.seed))
    if config.algorithm.advantage == "gae":
        variables[VALUE] = put({VALUE: init_value_head(loaded.config.hidden_size)})[VALUE]
    count = count_weights(variables["params"])
    trained = (f", LoRA rank {lora.rank}" if lora else "") + (", value head" if VALUE in variables else "")
    trained = trained if section.quantised == "none" else f" on {section.quantised}{trained}"
    say("policy", f"{section.path}: {count:,} parameters, {section.compute_dtype}{trained}, on {_listed(devices)}")
    return loaded._replace(params=None), shard_policy(policy, mesh), lora, variables, mesh


def _check_room(config: Config, limit: int | None) -> None:
    """Learned positions end: the longest prompt and the longest completion must fit together."""
    prompt, completion = config.data.max_prompt_tokens, config.sampling.max_new_tokens
    if limit is not None and prompt + completion > limit:
        raise UserError(
            f"data.max_prompt_tokens = {prompt} and sampling.max_new_tokens = {completion} make {prompt + completion} "
            f"tokens, but {config.policy.path} has learned positions for {limit} only: lower one of them"
        )


def _load_prompts(config: Config, prompts: Any, say: Say) -> Any:
    from grpo_jax.rollout import data

    name = config.data.prompts
    if prompts is not None:
        name = "given"
        if not isinstance(prompts, data.PromptSet):
            records = [{"prompt": row} if isinstance(row, str) else dict(row) for row in prompts]
            rows = data.make_prompt_set(records).train
            prompts = data.split_rows(rows, held_out=config.data.held_out)
    elif name == "miniature":
        world = own_bridges()("miniature.world")
        counts = (2048, config.evaluation.validation_prompts or 1, config.evaluation.prompts or 256)
        splits = zip(data.SPLITS, counts, strict=True)
        prompts = data.make_prompt_set(*(world.prompts(split, count) for split, count in splits))
    else:
        prompts = data.load_prompts(name, held_out=config.data.held_out)
    return _tell_prompts(config, name, prompts, say)


def _tell_prompts(config: Config, name: str, prompts: Any, say: Say) -> Any:
    """Says how many there are, and refuses too few for one batch before anything slow."""
    from grpo_jax.rollout.data import batches_per_epoch

    sizes = f"{len(prompts.train)} train, {len(prompts.validation)} validation, {len(prompts.test)} test"
    say("prompts", f"{name}: {sizes}")
    batches_per_epoch(len(prompts.train), config.training.prompts_per_batch)
    return prompts


def allowed_tokens(config: Config, loaded: Any) -> np.ndarray | None:
    """The mask bool [V] that data.allowed_tokens names; None for every token."""
    if config.data.allowed_tokens == "all":
        return None
    from grpo_jax.tasks.prompt_enhancement import rewriting as prompt_enhancement

    return prompt_enhancement.allowed_tokens(
        loaded.tokenizer, config.data.allowed_tokens, vocab_size=loaded.config.vocab_size, eos_ids=loaded.eos_ids
    )


def _conditions(sections: Sequence[RewardSection]) -> tuple[Any, ...]:
    from grpo_jax.core.advantages import Condition

    index = {section.label: position for position, section in enumerate(sections)}
    return tuple(
        Condition(index[section.label], index[section.condition_on], section.threshold)
        for section in sections
        if section.condition_on is not None
    )


def restore_variables(parts: Parts, run_dir: str | Path, checkpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The policy's variables of a checkpoint ("final", "best" or a step), on its device, and the checkpoint's meta."""
    return _restore(parts.variables, run_dir, checkpoint)


def restore_policy(run_dir: str | Path, checkpoint: str) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]:
    """A run's policy without its judges: (loaded folder, functions, LoRA config, variables, checkpoint's meta)."""
    config = run_config(run_dir)
    config = dataclasses.replace(config, policy=dataclasses.replace(config.policy, mesh=MeshSection()))
    loaded, policy, lora, variables, _ = _load_policy(config, jax.devices()[:1], lambda *_: None)
    return loaded, policy, lora, *_restore(variables, run_dir, checkpoint)


def _restore(variables: dict[str, Any], run_dir: str | Path, checkpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint holds the trained collections alone; frozen weights are those of the folder."""
    from grpo_jax.runs.checkpoint import restore_params

    which = int(checkpoint) if checkpoint.isdigit() else checkpoint
    trained = {name: variables[name] for name in trained_collections(variables)}
    restored, meta = restore_params(run_dir, which, trained)
    return {**variables, **restored}, meta
