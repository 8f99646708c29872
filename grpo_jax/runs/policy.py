"""The policy of a config: its folder, functions and variables, placed on their devices."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from grpo_jax.config.command_line import load_config
from grpo_jax.config.fields import flat, require
from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.config.sections import LoraSection, MeshSection
from grpo_jax.errors import UserError, complain, short_name
from grpo_jax.models.attention import has_triton
from grpo_jax.models.broadcast import process_count
from grpo_jax.models.hf import folder as hf
from grpo_jax.models.hf.peft import BASE, CONFIG
from grpo_jax.models.hf.weights import read_json_file, weight_files
from grpo_jax.models.lora import count_weights
from grpo_jax.models.policy import Policy, load_policy
from grpo_jax.models.random_init import write_policy
from grpo_jax.models.sharding import gather, on_host
from grpo_jax.models.variables import VALUE, VISUAL, Variables
from grpo_jax.models.vision.pictures import Pictures, PictureStates, pack_rows, same_size
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.encoding import ImageProcessor, load_image_processor, prepare_rows
from grpo_jax.rollout.pictures import source_of
from grpo_jax.runs.checkpoint import DRAWING, EVALUATED, Checkpoints
from grpo_jax.runs.directory import RunDirectory, saved_steps
from grpo_jax.runs.processes import digest_files
from grpo_jax.runs.session import READ, WEIGHTS, Record, require_same_task
from grpo_jax.tasks.task import Vocabulary
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import trained_weights
from grpo_jax.training.update import make_forward_step

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

NEW = "new"
"""As policy.path: a small policy with random weights, made of the task's words."""
START = "start"
"""As a checkpoint: the policy that policy.path names, untrained."""
_JUDGE_WEIGHTS = (".path", ".model", ".pretrained", ".lora")  # ends of judges' fields
_CHAT_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|assistant|>")


def policy_folder(config: Config) -> str:
    """Resolve policy.path to a folder or hub id: the path itself, a bundled policy, or the run's new one."""
    path = config.policy.path
    if path == NEW and config.run_dir is None:
        raise UserError("policy.path: 'new' is kept in the run's folder: name it with run_dir")
    if path == NEW:
        return str(RunDirectory(str(config.run_dir)).start)
    require(path, "policy.path", "a Hugging Face folder or hub id", path)
    folder = bundled_policy(path)
    # Its files are read again at the end, when a reward may have changed the working directory.
    return os.path.abspath(folder) if os.path.exists(folder) else folder


def make_new_policy(config: Config, vocabulary: Vocabulary | None) -> None:
    """Write the folder of policy.path "new", unless a run has trained from it; do nothing for other paths."""
    if config.policy.path != NEW:
        return
    if vocabulary is None:
        raise UserError("policy.path: expected a folder, got 'new': this task has no words for a new policy")
    folder, section, run = Path(policy_folder(config)), config.policy.new, RunDirectory(str(config.run_dir))
    begins = config.resume and not run.holds_checkpoint()  # its fields may have changed since
    if begins or not (folder / "config.json").is_file():
        write_policy(
            folder,
            vocabulary.words(),
            section,
            seed=config.seed,
            plain_words=True,
            vectors=vocabulary.vectors and vocabulary.vectors(section.width),
        )


def unused_chat_mark(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a chat token of the tokenizer that no chat template uses; else ""."""
    if getattr(tokenizer, "chat_template", None):
        return ""
    vocabulary = tokenizer.get_vocab()
    return next((mark for mark in _CHAT_MARKS if mark in vocabulary), "")


def load_run_policy(
    config: Config,
    devices: Sequence[jax.Device],
    info: Callable[..., None],
    *,
    pictures: bool | None = False,
    read: hf.PolicyFolder | None = None,
) -> Policy:
    """Load a run's policy on the devices of its mesh, and log a line (info(name, detail)) about it.

    Without `pictures` its vision tower is loaded only if trained; None loads it if there is one. `read` is the result
    of `hf.read_folder`, if already read.
    """
    policy = load_policy(
        read or policy_folder(config),
        config.policy,
        devices=devices,
        vision=pictures,
        value_head=config.algorithm.learns_values,
        seed=config.seed,
    )
    prompt, completion, limit = config.data.max_prompt_tokens, config.sampling.stream_tokens, policy.max_positions
    if limit is not None and prompt + completion > limit:
        named = "sampling.max_new_tokens" if config.sampling.turns == 1 else "sampling.turns with their observations"
        raise UserError(
            f"data.max_prompt_tokens = {prompt} and {named} = {completion} make {prompt + completion} "
            f"tokens, but {config.policy.path} has positions for {limit} only: lower one of them"
        )
    top_k, vocabulary = config.sampling.top_k, policy.config.vocab_size
    require(top_k <= vocabulary, "sampling.top_k", f"at most the policy's {vocabulary} tokens, or 0 for all", top_k)
    info("policy", _described(config, policy, devices))
    adapter, base = config.policy.lora.path, policy.folder.name
    learned_on = str((adapter and read_json_file(Path(os.path.expanduser(adapter)) / CONFIG).get(BASE)) or base)
    if Path(learned_on).name != Path(base).name:
        info("policy", f"warning: the adapter in {adapter} was trained on {learned_on}, and policy.path is {base}")
    if policy.platform == "cuda" and not has_triton():
        info("policy", f"jax {jax.__version__} has no Pallas on Triton: attention is XLA's, slower (docs/planning.md)")
    if policy.attn_implementation == "cudnn" != policy.attention:
        info("policy", "attn_implementation cudnn is for bfloat16 on one GPU, from A100 on: this run has auto")
    return policy


def load_teacher(config: Config, policy: Policy, **distribution: Any) -> Callable[[Batch], jax.Array] | None:
    """Load algorithm.teacher and compile batch → its log-probabilities f32 [P, G, T]; None without a folder.

    `distribution` is allowed_tokens and trie of `make_forward`. UserError for a teacher with another vocabulary, or for
    a policy with pictures.
    """
    path = config.algorithm.teacher
    if not path:
        return None
    blind = VISUAL not in policy.variables and VISUAL not in policy.variables["params"]
    require(blind, "algorithm.teacher", "none beside a policy that sees pictures", path)
    section = config.policy.replace(path=path, lora=LoraSection(), quantised="none")
    leaf = jax.tree.leaves(policy.variables)[0]
    devices = list(leaf.devices()) if policy.mesh is None else list(policy.mesh.devices.flat)
    teacher = load_policy(bundled_policy(path), section, devices=devices)
    same = teacher.folder.tokenizer.get_vocab() == policy.folder.tokenizer.get_vocab()
    same = same and teacher.config.vocab_size == policy.config.vocab_size
    require(same, "algorithm.teacher", "a policy with the tokens of policy.path", path)
    forward = make_forward(teacher, temperature=config.sampling.temperature, **distribution)
    parts = config.training.minibatches * config.training.grad_accumulation_steps
    look = make_forward_step(forward, grad_accumulation_steps=parts)
    return lambda batch: look(teacher.variables, batch).logprobs


def policy_identity(config: Config, policy: Policy, *, teacher: bool) -> dict[str, str]:
    """Return digests of what checkpoints lack: frozen weights (base, tower, teacher), config and tokenizer."""
    folders = {"policy.path": policy.folder.path} if policy.lora or VISUAL in policy.variables else {}
    if teacher and config.algorithm.teacher:
        folders["algorithm.teacher"] = hf.resolve_folder(bundled_policy(config.algorithm.teacher))
    read = digest_files(policy.folder.path / name for name in hf.READ_FILES)
    digests = {f"{WEIGHTS} of {name}": digest_files(weight_files(folder)) for name, folder in folders.items()}
    return digests | {READ: read}


def judges_identity(config: Config) -> dict[str, str]:
    """Return digests of the files and folders that fields of judges name; those of a hub id have none."""
    fields = {name: str(value) for name, value in flat(config.model_dump()["judges"]).items()}
    fields = {name: value.removeprefix("local-dir:") for name, value in fields.items() if name.endswith(_JUDGE_WEIGHTS)}
    places = {name: Path(os.path.expanduser(value)) for name, value in fields.items() if value}
    return {
        f"{WEIGHTS} of judges.{name}": digest_files([place, *place.rglob("*.safetensors"), *place.rglob("*.json")])
        for name, place in places.items()
        if os.path.exists(place)
    }


def bundled_policy(path: str) -> str:
    """Return the folder of a bundled policy, or the path itself, which need not exist."""
    return os.path.expanduser(str(own_package("bridges").bundled(path, "policy") or path))


def _described(config: Config, policy: Policy, devices: Sequence[jax.Device]) -> str:
    section, variables = config.policy, policy.variables
    trained = "" if section.quantised == "none" else f" on {section.quantised}"
    trained += f", LoRA rank {policy.lora.rank}" if policy.lora else ""
    trained += ", value head" if VALUE in variables else ""
    count, tower = count_weights(variables["params"]), ""
    if VISUAL in variables:
        adapted = " with adapters" if VISUAL in variables.get("lora", {}) else ""
        tower = f", a frozen vision tower of {count_weights(variables[VISUAL]):,}{adapted}"
    elif VISUAL in variables["params"]:
        tower = f", {count_weights(variables['params'][VISUAL]):,} of them in its vision tower"
    ignored = devices[0].platform == "cpu" and policy.precision != "bfloat16"
    rounded = "" if policy.precision is None or ignored else f" (matmul_precision {policy.precision})"
    precision, place = f"{section.compute_dtype}{rounded}{trained}", ", ".join(map(str, devices))
    return f"{section.path}: {count:,} parameters{tower}, {precision}, on {place}"


def run_config(run_dir: str | Path) -> Config:
    """Read the config of a run directory; UserError if it is missing."""
    path = RunDirectory(run_dir).config
    if not os.path.isfile(path):
        raise UserError(f"{short_name(run_dir)}: no config.yaml there; give the run directory of a training run")
    return load_config(path).replace(run_dir=str(run_dir))  # the folder may have moved since


def restore_policy(
    run_dir: str | Path, checkpoint: str, *, pictures: bool | None = False
) -> tuple[Config, Policy, Record]:
    """Restore a run's config, its policy from a checkpoint (on one device, without judges), and the meta."""
    config = run_config(run_dir)
    config = config.replace(policy=config.policy.replace(mesh=MeshSection()))
    policy = load_run_policy(config, [_policy_device(config)], lambda *_: None, pictures=pictures)
    identity = policy_identity(config, policy, teacher=False)
    variables, meta = restore_variables(policy.variables, run_dir, checkpoint, identity)
    return config, policy.replace(variables=variables), meta


def _policy_device(config: Config) -> jax.Device:
    """Return the first device of devices.policy, or one of this machine's; JAX sees no other GPU."""
    placement = own_package("bridges", "placement")
    try:
        places, _ = placement.place({placement.POLICY: config.requests[placement.POLICY]})
    except UserError:  # trained on another machine
        places, _ = placement.place({placement.POLICY: "auto"})
    first = {placement.POLICY: places[placement.POLICY].split(",")[0]}
    placement.prepare_jax(first)
    return placement.policy_devices(first)[0]


def restore_variables(
    variables: Variables, run_dir: str | Path, checkpoint: str, identity: Mapping[str, str]
) -> tuple[Variables, Record]:
    """Restore a checkpoint's trained variables beside the frozen ones of `variables`, and its meta.

    `START` is the loaded policy before any training. UserError if the checkpoint's task has another `identity`.
    """
    if checkpoint == START:
        return variables, {"step": 0}
    with Checkpoints(RunDirectory(run_dir).checkpoints, read_only=True) as checkpoints:
        state, meta = checkpoints.restore(checkpoint, {EVALUATED: trained_weights(variables)})
        step, newest = meta["step"], max(saved_steps(checkpoints.folder))
    if checkpoint == "final" and step < newest:  # of a run that was made longer
        gone_on = f"is of step {step}, and the run has gone on to step {newest}"
        complain(f"warning: checkpoint final {gone_on}: --checkpoint latest")
    require_same_task(saved_task(meta), identity, checkpoints.folder)
    return {**variables, **state[EVALUATED]}, meta


def saved_task(meta: Record) -> dict[str, str]:
    """Return the identity of the task in a checkpoint's meta; other versions may write other progress."""
    return meta.get("progress", {}).get("identity", {}).get("task", {})


def saved_renderer(state: dict[str, np.ndarray], run_dir: str | Path, checkpoint: str | int) -> dict[str, np.ndarray]:
    """Return the renderer's state in a checkpoint, by name or step; for `START` the given one, before training."""
    if checkpoint in (START, 0):
        return state
    with Checkpoints(RunDirectory(run_dir).checkpoints, read_only=True) as checkpoints:
        return checkpoints.restore(checkpoint, {DRAWING: state})[0][DRAWING]


def image_processor_of(config: Config, loaded: hf.PolicyFolder) -> Callable[[], ImageProcessor] | None:
    """Return a cached loader of the policy's image processor; None for a policy without pictures."""
    vision = loaded.config.vision
    if vision is None:
        return None
    return functools.cache(lambda: load_image_processor(loaded.path, vision, config.data.picture_size))


def make_see(policy: Policy) -> Callable[[Variables, Pictures], tuple[PictureStates, PictureStates | Pictures]]:
    """Make see(variables, `Pictures`) → (their states, the update's input).

    The update's input is the states of a frozen tower, or the pictures for a tower that is trained or has adapters.
    """
    compiled = jax.jit(policy.encode_images)

    def see(variables: Variables, pictures: Pictures) -> tuple[PictureStates, PictureStates | Pictures]:
        # Rendered pictures are on one device: for a mesh, shard them from the host.
        placed = pictures if policy.mesh is None else jax.device_get(pictures)
        states = gather(compiled(variables, placed), policy.mesh)
        if process_count() > 1:  # several processes make batches on the host
            states = on_host(states)
        frozen = VISUAL in variables and VISUAL not in variables.get("lora", {})
        return states, states if frozen else pictures

    return see


def make_prepare(
    image_processor: Callable[[], ImageProcessor], device: jax.Device | None = None
) -> Callable[[object], Pictures]:
    """Make prepare(pictures) → `Pictures` [N, 1, ..], one in each row.

    torch pictures, float [N, 3, H, W] in [0, 1], are passed by dlpack: without a copy if the policy's `device` (None:
    JAX's device of the pictures) is theirs, else with one copy. A list of a data row's sources goes through the
    folder's image processor on the host.
    """

    def prepare(pictures: Any) -> Pictures:
        processor = image_processor()
        if not hasattr(pictures, "detach"):
            try:
                rows = [Row(place, "", pictures=(source_of(picture, None),)) for place, picture in enumerate(pictures)]
            except ValueError as error:
                raise UserError(f"pictures: {error}") from error
            return pack_rows(prepare_rows(rows, processor), processor.vision)
        patches, grid = own_package("bridges", "pixels").patches_of(pictures, processor.settings)
        return same_size(own_package("bridges", "dlpack").to_jax(patches.unsqueeze(1), device), grid, processor.vision)

    return prepare
