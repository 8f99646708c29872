"""Config of a run: all sections, and the checks that span them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_jax.config import sections
from grpo_jax.config.copies import own_copy
from grpo_jax.config.fields import Each, NonNegative, OneOf, Section, Words, build, merged, require, resume_mutable
from grpo_jax.config.files import Values
from grpo_jax.config.judge import Judge, default_device
from grpo_jax.errors import UserError

TASKS = OneOf("task", "grpo_jax.tasks.{}.task", "grpo_jax.tasks.{}_task")
"""The tasks that ship with the package, each a folder or a module."""
JUDGES = OneOf("judges", "bridges.judges.{}")
"""The judges that ship with the package, each a module."""
POLICY = "policy"
"""The policy's name in `devices`."""
RENDERER = "renderer"
"""The name in `judges` of the model that draws pictures."""

_LAGGING_CAP = 2.0  # the threshold of verl's configs
_SAFE_RATES = {False: 1e-6, True: 1e-4}  # by whether adapters are trained


class Config(Section):
    """Seed, folder and other settings of the whole run."""

    task: Annotated[Any, TASKS]
    """Task of the policy: a name of the package, package.module:Class or file.py:Class, with its own fields beside
    it."""
    seed: int = 0
    """Seed of all random numbers."""
    run_dir: str | None = resume_mutable(None)
    """Folder of the run; null makes runs/TASK-TIME."""
    resume: bool = resume_mutable(False)
    """Continue the run in run_dir from its last checkpoint."""
    report_to: Annotated[list[Literal["tensorboard", "wandb"]], Each] = resume_mutable(
        default_factory=lambda: ["tensorboard"] if find_spec("tensorboard") else []
    )
    """Metric writers beside metrics.jsonl (docs/runs.md), [] for none; by default tensorboard, if it is installed."""
    deterministic: bool = resume_mutable(False)
    """Use deterministic kernels on GPUs, which are slower; CPU runs always are deterministic."""
    push_to_hub: str = resume_mutable("")
    """Repository of the Hugging Face hub, OWNER/NAME, to push policy/ to when the run ends (docs/publishing.md); empty
    for none."""
    on_judge_error: Literal["stop", "missing"] = resume_mutable("stop")
    """If a judge fails: "stop" saves and ends the run; "missing" gives that completion no reward."""
    judge_timeout: NonNegative = resume_mutable(1800.0)
    """Time limit of a judge for one chunk, in seconds; 0 for none."""
    judges: dict[str, Annotated[Judge, JUDGES]] = {}
    """Models that score texts or render pictures, by name. Each has a kind of the package, package.module:Class or
    file.py:Class, its own fields, and those of a pool of Ray actors (docs/judges.md)."""
    policy: sections.PolicySection = Field(default_factory=sections.PolicySection)
    data: sections.DataSection = Field(default_factory=sections.DataSection)
    sampling: sections.SamplingSection = Field(default_factory=sections.SamplingSection)
    algorithm: sections.AlgorithmSection = Field(default_factory=sections.AlgorithmSection)
    ppo: sections.PPOSection = Field(default_factory=sections.PPOSection)
    optimizer: sections.OptimizerSection = Field(default_factory=sections.OptimizerSection)
    training: sections.TrainingSection = Field(default_factory=sections.TrainingSection)
    sft: sections.SFTSection = Field(default_factory=sections.SFTSection)
    rewards: Annotated[list[sections.RewardSection], Each] = []
    """Rewards of the run; empty for the task's default."""
    eval_rewards: Words = []
    """Rewards and measures of the task that are logged but not trained on."""
    evaluation: sections.EvaluationSection = Field(default_factory=sections.EvaluationSection)
    devices: dict[str, str] = resume_mutable({})
    """Device of each judge and of "policy", by name: "auto" (the default), "cpu" or "gpu:N". For "policy" also the
    devices of a mesh, as "gpu:0,gpu:1"."""

    def __post_init__(self) -> None:
        """Check the fields that no section can check alone."""
        self.require(0 <= self.seed < 2**63, "seed", "a number in [0, 2^63)")
        unknown = [name for name in self.devices if name not in (POLICY, *self.judges)]
        require(not unknown, "devices", f"names of {', '.join((POLICY, *self.judges))}", unknown)
        require(POLICY not in self.judges, "judges", "another name: policy is the policy's", sorted(self.judges))
        self._check_rewards()
        self._check_sampling()
        self._check_training()
        self._check_renderer()
        self.task.check(self)

    @property
    def requests(self) -> dict[str, str]:
        """Return each part's requested device, the policy first: that of `devices`, else the default of `load`."""
        return {POLICY: "auto", **{name: default_device(judge) for name, judge in self.judges.items()}, **self.devices}

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Return the names of judges that use no device of this process."""
        return tuple(name for name, judge in self.judges.items() if judge.pool)

    @property
    def learning_rate(self) -> float:
        """Return the peak learning rate: the configured one, or a safe one for full training or adapters."""
        return self.optimizer.learning_rate or _SAFE_RATES[self.policy.lora.used]

    @property
    def pictures_per_text(self) -> int:
        """Return the pictures of each text in training (K): judges.renderer.pictures, if the renderer has it."""
        return getattr(self.judges.get(RENDERER), "pictures", 1)

    @property
    def learns(self) -> str:
        """Return training.learns: the configured value, or "both" if the renderer has settings to train with."""
        trained = getattr(self.judges.get(RENDERER), "train", None) is not None
        return self.training.learns or ("both" if trained else "rewriter")

    @property
    def renderer_learns(self) -> bool:
        """Return whether judges.renderer is trained."""
        return self.learns != "rewriter"

    @property
    def resolved_algorithm(self) -> sections.AlgorithmSection:
        """Return the section algorithm with its importance_cap: the configured one, or the default of async_level."""
        cap, default = self.algorithm.importance_cap, _LAGGING_CAP if self.training.async_level else 0.0
        return self.algorithm.replace(importance_cap=default if cap is None else cap)

    @property
    def resolved(self) -> Config:
        """Return the config with its `resolved_algorithm`; a checkpoint's identity holds it."""
        return self.replace(algorithm=self.resolved_algorithm)

    def _check_rewards(self) -> None:
        labels = [reward.called for reward in self.rewards]
        expected = "each reward under another name (two of one function: give one a label beside its name)"
        require(len(set(labels)) == len(labels), "rewards", expected, labels)
        lowered = [reward.called for reward in self.rewards if reward.weight < 0]
        highest = "a measure to raise, and not a reward of negative weight: the best value is the highest"
        self.require(self.evaluation.best_by not in lowered, "evaluation.best_by", highest)
        targets = {reward.called: reward.condition_on for reward in self.rewards}
        for label, target in targets.items():
            where, chain = f"rewards.{label}.condition_on", [label]
            others = [other for other in labels if other != label]
            require(target in (None, *others), where, f"one of {others}", target)
            while target in targets:
                require(target not in chain, where, "a chain that ends", " → ".join([*chain, target]))
                chain, target = [*chain, target], targets[target]

    def _check_sampling(self) -> None:
        section, algorithm = self.sampling, self.algorithm
        enough = section.group_size >= 2 or not algorithm.compares_groups
        self.require(enough, "sampling.group_size", "at least 2 (a group is compared)")
        subsets = algorithm.advantage != "max_at_k" or 2 <= algorithm.best_of <= section.group_size
        self.require(subsets, "algorithm.best_of", "2 to sampling.group_size with advantage 'max_at_k'")
        fits = algorithm.overlong_buffer <= section.max_new_tokens
        self.require(fits, "algorithm.overlong_buffer", f"at most sampling.max_new_tokens = {section.max_new_tokens}")
        read = not algorithm.teacher or not algorithm.learns_values or algorithm.kl_coef + self.ppo.kl_coef > 0
        self.require(read, "algorithm.teacher", "none with advantage 'gae' and no KL (kl_coef, ppo.kl_coef)")
        chat = section.turns == 1 or self.data.form != "append"
        self.require(chat, "sampling.turns", "1 with data.form append, which continues the prompt")

    def _check_renderer(self) -> None:
        renderer: Any = self.judges.get(RENDERER)
        if not self.renderer_learns:
            return
        trained, where = getattr(renderer, "train", None), f"judges.{RENDERER}"
        require(trained, "training.learns", f"'rewriter' without {where}.train, its settings", self.learns)
        alone = "null with judges.renderer.train: its gradients need the renderer in the run's own process"
        require(renderer.pool is None, f"{where}.pool", alone, renderer.pool)
        newest = "0 where the renderer learns: pictures are drawn by its newest weights"
        self.require(self.training.async_level == 0, "training.async_level", newest)
        several = self.sampling.group_size * renderer.pictures > 1
        self.require(several, "sampling.group_size", f"at least 2, or {where}.pictures 2: pictures are compared")

    def _check_training(self) -> None:
        policy, training = self.policy, self.training
        quantisable = policy.quantised == "none" or (policy.lora.used and policy.mesh.size == 1)
        self.require(quantisable, "policy.quantised", "none without policy.lora, or over a mesh")
        narrow = training.grad_dtype == "float32" or not policy.lora.used
        self.require(narrow, "training.grad_dtype", "float32 with policy.lora, whose adapters keep it")
        prompts = training.prompts_per_batch // (training.minibatches * training.grad_accumulation_steps)
        divisor = (
            f"a divisor of {prompts}, the prompts of one micro-batch (training.prompts_per_batch / minibatches / "
            "grad_accumulation_steps)"
        )
        self.require(prompts % policy.mesh.fsdp == 0, "policy.mesh.fsdp", divisor)
        validates = not training.early_stopping_patience or self.evaluation.every > 0
        self.require(validates, "training.early_stopping_patience", "0 with evaluation.every 0, which never validates")
        fits = training.prompts_per_batch % (training.chunk_prompts or 1) == 0
        self.require(fits, "training.chunk_prompts", f"a divisor of prompts_per_batch = {training.prompts_per_batch}")


def find_task(value: Any) -> type:
    """Return the task class named by a value; UserError if there is none."""
    try:
        return TASKS.class_of(value)
    except ValueError as error:
        raise UserError(f"task: {error}") from error


def make_config(values: Values | None = None, **sections: Any) -> Config:
    """Make the config of a run from nested plain values, as in a YAML file, over the task's defaults.

        make_config(task="text", policy={"path": "path/to/Qwen2.5-0.5B-Instruct"}, sampling={"group_size": 8})

    Args:
        values: The values as one mapping.
        sections: Values as keywords; they override `values`.

    Raises:
        UserError: An unknown or missing field, a value of another type, or one out of range.
    """
    given = own_copy(merged(values or {}, sections))
    try:
        return build(Config, merged(find_task(given.get("task")).defaults, given))
    except UserError as error:
        raise error.with_traceback(None) from None  # show only the line, not the frames of this package
