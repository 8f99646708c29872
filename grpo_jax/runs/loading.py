"""Load everything that a config names: first checks without weights, then policy and judges."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np

from grpo_jax.config.fields import flat, require
from grpo_jax.config.judge import Judge, title
from grpo_jax.config.named import IN_PYTHON, own_package
from grpo_jax.config.other_names import metric_hint
from grpo_jax.config.run import POLICY, RENDERER, Config
from grpo_jax.config.sections import TODAY, PolicySection
from grpo_jax.errors import UserError, short_repr
from grpo_jax.models.broadcast import broadcast, from_main_process, is_main_process, on_all_processes, process_count
from grpo_jax.models.hf import folder as hf
from grpo_jax.models.policy import Policy
from grpo_jax.models.variables import precision_of
from grpo_jax.models.vision.pictures import Pictures
from grpo_jax.rollout import reward_registry
from grpo_jax.rollout.data import SPLITS, Encoded, PromptSet, all_rows, batches_per_epoch, data_identity, row_facts
from grpo_jax.rollout.encoding import choices_trie, make_decode, make_encode, policy_tokens, template_options
from grpo_jax.rollout.env import EnvSettings, make_encode_observation
from grpo_jax.rollout.reward_registry import ResolvedRewards
from grpo_jax.rollout.rewards import Reward, Score, arguments_of
from grpo_jax.rollout.rollout import RolloutFns
from grpo_jax.rollout.tools import unread_call
from grpo_jax.runs.context import RunContext
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.runs.metrics import require_names
from grpo_jax.runs.policy import (
    NEW,
    image_processor_of,
    judges_identity,
    load_run_policy,
    make_new_policy,
    make_prepare,
    make_see,
    policy_folder,
    policy_identity,
    run_config,
    unused_chat_mark,
)
from grpo_jax.runs.processes import digest_files, require_same
from grpo_jax.runs.python_input import kept_prompts
from grpo_jax.runs.session import CODE, SCORE
from grpo_jax.sampling.samplers import make_samplers
from grpo_jax.tasks.task import Info, TaskData, TaskSetup, TurnEnvironment

if TYPE_CHECKING:
    from bridges.trainable import TrainableRenderer

T = TypeVar("T")
_ON_THIS_MACHINE = "SLURM_LOCALID"


class LoadedPolicy(NamedTuple):
    """A policy with the functions that read its prompts; the last two are None without pictures."""

    config: Config  # the run's, with the date of the chat template
    policy: Policy
    encode: Callable[..., Encoded]
    prepare: Callable[[object], Pictures] | None  # pictures → the image processor's arrays
    encode_images: Callable[..., Any] | None


def load(
    config: Config,
    info: Info,
    *,
    prompts: PromptSet | None = None,
    rewards: Mapping[str, Reward] = MappingProxyType({}),
    stopping: Callable[[], bool] = lambda: False,
    exit_stack: ExitStack | None = None,
    trains: bool = False,
) -> RunContext:
    """Load everything, one line (info(name, detail)) per part.

    `prompts` and `rewards` (functions by label) replace the config's; without `prompts`, those from Python are read
    from the run directory, which keeps them. `exit_stack` closes judges with external resources at the end of the run.
    Only process 0 loads judges. If the run `trains`, odd settings are noted, and the teacher identifies it too.
    """
    if prompts is None and config.data.prompts == IN_PYTHON:
        prompts = kept_prompts(RunDirectory(str(config.run_dir)))
    if config.policy.path != NEW:
        hf.require_folder(policy_folder(config))  # a mistyped one is found before data and rewards are read
    if config.deterministic:
        ask_for_determinism(torch_too=bool(config.judges))
    if config.judges and is_main_process():
        section = config.policy
        own_package("bridges", "loading").match_precision(precision_of(section.compute_dtype, section.matmul_precision))
    placement = place_parts(config, info)
    data, resolved = load_data(config, info, prompts, rewards)
    for line in training_warnings(config, resolved) if trains else ():
        info("training", f"warning: {line}")
    batches = batches_per_epoch(len(data.prompts.train), config.training.prompts_per_batch)
    iterations = config.training.max_steps or config.training.num_epochs * batches
    pooled, own = own_package("bridges", "ray_pool").placed, config.judges if is_main_process() else {}
    sections: dict[str, Judge] = {name: pooled(judge, f"judges.{name}") for name, judge in own.items()}
    call_judges(sections, lambda _, judge: judge.check())
    devices = policy_devices(placement, config.policy)
    loaded = load_policy(config, data, devices, info)
    config, policy = loaded.config, loaded.policy
    identity = policy_identity(config, policy, teacher=trains)
    identity |= from_main_process(lambda: judges_identity(config) | code_identity(config, resolved))
    require_same(identity)
    data = dataclasses.replace(data, identity={**data.identity, **identity})
    allowed = policy_tokens(config, policy.folder)
    trie = choices_trie(config, data.choices and data.choices.texts, policy.folder)
    samplers = make_samplers(config.sampling, config.evaluation, policy, allowed, trie)
    if exit_stack is not None and config.elsewhere:
        exit_stack.callback(own_package("bridges", "ray_cluster").leave)
    judges, renderer = call_judges(sections, lambda name, judge: judge.load(placement[name])), None
    for name, judge in judges.items():
        info(name, title(judge))
    if config.renderer_learns:
        renderer = judges[RENDERER] = trainable_renderer(config, judges[RENDERER])
    fns = make_rollout_fns(loaded, data, resolved, judges)
    check_measures(config, data.prompts, fns)
    if renderer is not None:
        judging = [name for name, weight in resolved.weights.items() if weight and name in fns.picture_rewards]
        expected = "one that judges pictures (with the argument images), for the renderer to learn from"
        require(judging, "rewards", expected, [*resolved.weights])
        info(RENDERER, f"learns from rewards with the argument images: {', '.join(judging)}")
    pools = {name: f"{judge.pool.replicas} actors of a Ray cluster" for name, judge in sections.items() if judge.pool}
    return RunContext(
        config=config,
        task_data=data,
        policy=policy,
        fns=fns,
        rewards=resolved,
        samplers=samplers,
        allowed_tokens=allowed,
        trie=trie,
        key=jax.random.key(config.seed),
        devices={**placement, **pools} if judges else {POLICY: ", ".join(map(str, devices))},
        iterations=iterations,
        renderer=renderer,
        stopping=stopping,
    )


def trainable_renderer(config: Config, renderer: object) -> TrainableRenderer:
    """Add adapters and an optimizer to the loaded judges.renderer."""
    judge: Any = config.judges[RENDERER]  # one with `train`, as the config requires
    return own_package("bridges", "trainable").TrainableRenderer(renderer, judge.train, seed=config.seed)


def load_data(
    config: Config, info: Info, prompts: PromptSet | None, rewards: Mapping[str, Reward]
) -> tuple[TaskData, ResolvedRewards]:
    """Load the task's data, and find the rewards; the arguments replace the config's."""
    data = config.task.load(TaskSetup(config, prompts, info))
    sizes = ", ".join(f"{len(part)} {split}" for part, split in zip(data.prompts, SPLITS, strict=True))
    info("prompts", f"{data.source or config.data.prompts or 'given'}: {sizes}")
    none_held_out = config.data.held_out and not any(map(len, data.prompts[1:]))
    if none_held_out and len(np.unique(row_facts(data.prompts.train)["digest"])) == 1:
        info("prompts", "warning: all rows have the same prompt, so none is held out (as with data.held_out 0)")
    data = dataclasses.replace(data, identity={**data.identity, **data_identity(data.prompts)})
    require_same({f"the data's {name}": str(value) for name, value in data.identity.items()})
    judges = tuple(config.judges)
    resolved = reward_registry.resolve_rewards(config.rewards, config.eval_rewards, data.rewards, judges, rewards)
    require_names(config, resolved, data.environment.controls)
    rows = all_rows(data.prompts)
    repeated = len(rows) - len(np.unique(rows.facts["id"]))  # random numbers and tools' rows are found by the id
    require(not repeated, "prompts", "rows of different ids, as of make_prompt_set", f"{repeated} with another's id")
    if config.renderer_learns:
        expected = "'rewriter' with a task whose renderer cannot be trained"
        require(data.learn is not None, "training.learns", expected, config.learns)
    reward_registry.require_columns(reward_registry.required_columns(resolved, data.rewards, judges), rows)
    reward_registry.require_values(resolved, rows)
    info("rewards", resolved.describe())
    return data, resolved


def code_identity(config: Config, rewards: ResolvedRewards) -> dict[str, str]:
    """Return a digest of the Python files that task, judges, rewards and tools are named by, if there are any."""
    values = map(str, flat(config.model_dump(include={"task", "judges"})).values())
    names = [*values, *(one.name for one in rewards.sections), *rewards.eval_rewards, *config.data.tool_names]
    places = {name.rpartition(":")[0] for name in names if not name.startswith(("grpo_jax.", "bridges."))}
    modules = {place: getattr(sys.modules.get(place), "__file__", None) or "" for place in places}
    files = {Path(os.path.expanduser(place if place.endswith(".py") else file)) for place, file in modules.items()}
    return {CODE: digest_files(files)} if any(map(Path.is_file, files)) else {}


def load_policy(config: Config, data: TaskData, devices: Sequence[jax.Device], info: Info) -> LoadedPolicy:
    """Load the policy's folder, check all prompts, which finds a mistake within seconds, and load its weights."""
    from_main_process(lambda: make_new_policy(config, data.vocabulary))
    if not config.judges:
        info("devices", f"policy on {', '.join(map(str, devices))}")
    rows = all_rows(data.prompts)
    pictures = data.environment.shows_pictures or bool(row_facts(rows)["pictures"].any())
    folder = hf.read_folder(policy_folder(config))
    config = with_template_date(config, folder.tokenizer)
    image_processor = image_processor_of(config, folder) if pictures else None
    encode = make_encode(
        folder.tokenizer,
        config.data,
        pad_id=folder.pad_id,
        vocab_size=folder.config.vocab_size,
        rows=rows,
        image_processor=image_processor,
        context_length=getattr(folder.config, "context_length", None),
        completion_tokens=config.sampling.stream_tokens,
    )
    if config.data.form != "append" and (mark := unused_chat_mark(folder.tokenizer)):
        missing = f"has no chat template, though its tokenizer has {mark}: prompts are plain text"
        info("policy", f"warning: {folder.path} {missing}")
    if config.data.tool_names and (form := unread_call(folder.tokenizer, template_options(config.data))):
        known = 'tool calls are read as <tool_call>{"name": …, "arguments": {…}}</tool_call> or {"name": …, …} alone'
        info("policy", f"warning: {known}, and the chat template of {folder.path} writes {short_repr(form)}")
    policy = load_run_policy(config, devices, info, pictures=pictures, read=folder)
    if image_processor is None:
        return LoadedPolicy(config, policy, encode, None, None)
    prepare = make_prepare(image_processor, devices[0] if policy.mesh is None else None)
    return LoadedPolicy(config, policy, encode, prepare, make_see(policy))


def call_judges(sections: Mapping[str, Judge], call: Callable[[str, Judge], T]) -> dict[str, T]:
    """Return call(name, judge) of each judge; an error names its judge, and all processes raise it."""

    def call_each() -> dict[str, T]:
        results = {}
        for name, judge in sections.items():
            with reward_registry.judge_named(name):
                results[name] = call(name, judge)
        return results

    return on_all_processes(call_each)


def training_warnings(config: Config, rewards: ResolvedRewards) -> Iterator[str]:
    """Yield a line for each value that is allowed, but destroys the policy or trains nothing."""
    rates = {"optimizer": config.learning_rate, **({"sft": config.sft.learning_rate} if config.sft.steps else {})}
    for section, rate in rates.items():
        if not 1e-9 <= rate < 0.1:
            yield f"{section}.learning_rate {rate:g}: an update moves each weight by about that; usual are 1e-7 to 1e-2"
    values = flat(config.model_dump())
    for name in ("sampling.stop", "data.instruction", "data.system_prompt"):
        if "\\n" in "".join(values[name]):
            yield f"{name} holds a backslash and an n: a line break is $'\\n' in a shell and \"\\n\" in YAML"
    yield from options_without_effect(config)
    if not (any(rewards.weights.values()) or config.algorithm.overlong_buffer or config.algorithm.advantage == "opd"):
        yield "all weights of rewards are 0: no reward trains the policy"


def options_without_effect(config: Config) -> Iterator[str]:
    """Yield a line for each changed option that another one's value makes useless, and for a warm-up without a peak."""
    training, algorithm, full = config.training, config.resolved_algorithm, "policy.lora.rank 0: all weights train"
    unread = {
        "training.num_epochs": training.max_steps > 0 and f"training.max_steps {training.max_steps} (0 counts epochs)",
        "ppo": not algorithm.learns_values and f"algorithm.advantage {algorithm.advantage}",
        "algorithm.best_of": algorithm.advantage != "max_at_k" and f"algorithm.advantage {algorithm.advantage}",
        "algorithm.importance_mode": not algorithm.importance_cap and "algorithm.importance_cap 0",
        "algorithm.overlong_weight": not algorithm.overlong_buffer and "algorithm.overlong_buffer 0",
        "policy.lora": not config.policy.lora.used and full,
        "policy.frozen_dtype": not config.policy.lora.used and f"{full}, but those of a frozen vision tower",
        "data.instruction": config.data.form == "append" and "data.form append",
    }
    changed = [name for name, value in flat(config.model_dump(exclude_defaults=True)).items() if value != {}]
    for name, why in unread.items():
        yield from (f"{one} has no effect with {why}" for one in changed if why and f"{one}.".startswith(f"{name}."))
    updates, warmup = training.max_steps * training.inner_epochs * training.minibatches, config.optimizer.warmup_steps
    if 0 < updates < warmup:
        yield f"optimizer.warmup_steps {warmup}: the run ends after {updates} updates, within its warm-up"


def with_template_date(config: Config, tokenizer: hf.Tokenizer) -> Config:
    """Fill in today's date if the chat template writes one; a resumed run keeps the date of its start."""
    options = config.data.chat_template_options
    writes = config.data.form != "append" and "strftime_now" in str(getattr(tokenizer, "chat_template", ""))
    if TODAY in options or not writes:
        return config
    kept = run_config(str(config.run_dir)).data.chat_template_options if config.resume else {}
    today = broadcast(kept.get(TODAY) or datetime.date.today().isoformat())
    return config.replace(data=config.data.replace(chat_template_options={**options, TODAY: today}))


def place_parts(config: Config, info: Info) -> dict[str, str]:
    """Choose each part's device on this machine, before JAX starts; processes share the policy's devices."""
    placement = own_package("bridges", "placement")
    requests = config.requests if is_main_process() else {POLICY: config.requests[POLICY]}
    away = {name: requests.pop(name) for name in config.elsewhere if name in requests}
    places, notes = placement.place(requests, policy_count=config.policy.mesh.size // process_count())
    cards = places[POLICY].split(",")
    shared = [config.judges[name] for name, where in places.items() if name != POLICY and where in cards]
    prepared = placement.prepare_jax(places)
    prepared += placement.share_memory(places, _bytes_of(shared)) if shared and cards != ["cpu"] else []
    for note in [*(notes if config.judges else ()), *prepared]:
        info("devices", note)
    return {**places, **away}


def _bytes_of(judges: Sequence[Judge]) -> int | None:
    """Return the total bytes that judges report; None if one does not report."""
    try:
        return sum(size for judge in judges for _, size, _ in judge.memory())
    except (AttributeError, UserError):
        return None


def policy_devices(places: Mapping[str, str], section: PolicySection) -> list[jax.Device]:
    """Return the policy's JAX devices for its mesh; with several processes, the same local devices of each.

    UserError if there are too few, or if another process runs on this machine and would take the same.
    """
    devices, mesh = own_package("bridges", "placement").policy_devices(places), section.mesh
    processes = process_count()
    count = mesh.size // processes
    if len(devices) < count:
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise UserError(
            f"policy.mesh: fsdp {mesh.fsdp} x tensor {mesh.tensor} takes {count} devices{each}, but the policy has "
            f"{len(devices)} ({', '.join(map(str, devices))}); make the mesh smaller (evaluate: --mesh FSDP TENSOR); "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} shows JAX that many on a CPU, for a trial"
        )
    if processes == 1:
        return devices[:count]
    if devices[0].platform == "gpu" and os.environ.get(_ON_THIS_MACHINE, "0") != "0":
        raise UserError(f"{_ON_THIS_MACHINE}: expected one process on each machine (srun --ntasks-per-node=1)")
    mine = jax.local_devices(backend=devices[0].platform)
    numbers = [mine.index(device) for device in devices[:count]]
    every = (jax.local_devices(process, devices[0].platform) for process in range(processes))
    return [local[number] for local in every for number in numbers]


def make_rollout_fns(
    loaded: LoadedPolicy, data: TaskData, rewards: ResolvedRewards, judges: Mapping[str, object]
) -> RolloutFns:
    """Make the functions between the policy's tokens and the rewards."""
    config, folder = loaded.config, loaded.policy.folder
    maximised, evaluated = (
        {reward.name: reward_registry.bind(reward, judges) if is_main_process() else reward.function for reward in part}
        for part in (rewards.maximised, rewards.evaluated)
    )
    return RolloutFns(
        encode=loaded.encode,
        decode=make_decode(folder.tokenizer, config.data, read=config.task.parser(config)),
        render=None if data.render is None or not is_main_process() else data.render(judges, rewards.argument_names),
        score=Score(
            maximised,
            evaluated,
            missing=config.on_judge_error == "missing",
            required=tuple(reward_registry.required_columns(rewards, data.rewards, judges)),
            columns_of=data.rewards.columns,
            tokenize=lambda text: folder.tokenizer(text, add_special_tokens=False)["input_ids"],
            role=data.environment.role,
        ),
        reward_names=tuple(maximised),
        eval_reward_names=tuple(evaluated),
        prepare=loaded.prepare,
        env=make_env_settings(config, data.environment, folder),
        encode_images=loaded.encode_images,
        picture_rewards=frozenset(name for name, reward in maximised.items() if "images" in arguments_of(reward)),
    )


def make_env_settings(config: Config, environment: TurnEnvironment, loaded: hf.PolicyFolder) -> EnvSettings | None:
    """Make the environment of an episode's turns; None for single-turn tasks."""
    section = config.sampling
    if section.turns == 1:
        return None
    if environment.step is None:
        raise UserError(f"sampling.turns: expected 1: this task has no environment; got {section.turns}")
    encode_observation = make_encode_observation(
        loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        vocab_size=loaded.config.vocab_size,
        limit=section.max_observation_tokens,
        vision=loaded.config.vision,
        role=environment.role,
        **template_options(config.data),
    )
    return EnvSettings(
        section.turns,
        environment.step,
        encode_observation,
        section.stream_tokens,
        loaded.pad_id,
        lenient=config.on_judge_error == "missing",
        eos_ids=tuple(loaded.eos_ids),
    )


def check_measures(config: Config, prompts: PromptSet, fns: RolloutFns) -> None:
    """Refuse a best checkpoint or early stopping by an unmeasured metric, and values that no prompt has."""
    patience, names = config.training.early_stopping_patience, (SCORE, *fns.reward_names, *fns.eval_reward_names)
    chosen_by = config.evaluation.best_by
    require(chosen_by in names, "evaluation.best_by", f"one of {', '.join(names)}{metric_hint(chosen_by)}", chosen_by)
    column, rows = config.evaluation.by, prompts.test[: config.evaluation.prompts or None]
    if column and (missing := sum(column not in row.columns for row in rows)):
        raise UserError(f"evaluation.by: {missing} of {len(rows)} held-out prompts have no column {column!r}")
    require(not column or fns.eval_reward_names, "evaluation.by", "nothing without eval_rewards to split", column)
    validated = not patience or prompts.validation[: config.evaluation.validation_prompts]
    never = "0, for there are no validation prompts (data.held_out, evaluation.validation_prompts)"
    require(validated, "training.early_stopping_patience", never, patience)


def ask_for_determinism(*, torch_too: bool) -> None:
    """Request deterministic GPU kernels, before JAX's backend starts and torch first uses cuBLAS; else UserError."""
    flag, flags = "--xla_gpu_deterministic_ops=true", os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        late = own_package("bridges", "placement").jax_has_started() and jax.default_backend() == "gpu"
        require(not late, "deterministic", "false in a process whose JAX has started: start a new one", True)
        os.environ["XLA_FLAGS"] = f"{flags} {flag}"
    if torch_too:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        import torch

        torch.use_deterministic_algorithms(True)
