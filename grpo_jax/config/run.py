"""What a run is made of: its config with the checks that span sections, and its plain form for YAML and JSON.

The sections are in `config_sections` and `config_algorithm`; every field has its help line in the docstring of its
class, which `python -m grpo_jax.train --help` prints.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_jax.config.algorithm import AlgorithmSection, PPOSection
from grpo_jax.config.sections import (
    DataSection,
    DeviceSection,
    EvaluationSection,
    LoraSection,
    MeshSection,
    NewPolicySection,
    OptimizerSection,
    PolicySection,
    RendererSection,
    RewardSection,
    SamplingSection,
    ScorerSection,
    TrainingSection,
    require,
)
from grpo_jax.tasks.recommendation.section import RecommendationSection
from grpo_jax.tasks.recommendation.sections import RetrievalSection, WarmStartSection

__all__ = [
    "AlgorithmSection",
    "Config",
    "DataSection",
    "DeviceSection",
    "EvaluationSection",
    "LoraSection",
    "MeshSection",
    "NewPolicySection",
    "OptimizerSection",
    "PPOSection",
    "PolicySection",
    "RecommendationSection",
    "RendererSection",
    "RetrievalSection",
    "RewardSection",
    "SamplingSection",
    "ScorerSection",
    "TrainingSection",
    "WarmStartSection",
    "from_dict",
    "to_dict",
    "to_yaml",
]


@dataclass(frozen=True)
class Config:
    """A run of grpo_jax.

    Args:
        task: "prompt_enhancement" judges pictures drawn from the text; "text" judges the text itself;
            "recommendation" where it ranks the item that came next.
        seed: Seed of everything random.
        run_dir: Folder of the run; null makes runs/TASK-TIME.
        resume: Continue the run in run_dir from its last checkpoint.
        deterministic: Ask GPUs for repeatable kernels (slower); the CPU always is.
        debug: Show tracebacks of user errors.
        report_to: Metric writers beside metrics.jsonl.
        on_judge_error: "stop" saves and ends the run; "missing" gives that completion no reward.
        judge_timeout: Seconds one chunk may spend in the renderer or the scorer; 0 for no limit.
        policy: The policy that is trained.
        data: Prompts.
        sampling: How completions are drawn.
        algorithm: Advantages and loss.
        ppo: The value head and what belongs to it (algorithm.advantage "gae").
        optimizer: AdamW and its schedule.
        training: The loop.
        renderer: The diffusion model (prompt_enhancement).
        scorer: The CLIP model (prompt_enhancement).
        recommendation: Users, items and prompts (recommendation).
        retrieval: What ranks the items (recommendation).
        warm_start: Supervised steps before the first iteration (recommendation).
        rewards: The objectives; empty takes the task's default.
        watch: Rewards that are logged and never trained on; of recommendation also hr@K, ndcg@K, mrr and mrr@K, and
            when it is empty hr@5, hr@10, ndcg@5, ndcg@10 and mrr.
        evaluation: Held-out measurement.
        devices: Where each part runs.
    """

    task: Literal["prompt_enhancement", "text", "recommendation"] = "prompt_enhancement"
    seed: int = 0
    run_dir: str | None = None
    resume: bool = False
    deterministic: bool = False
    debug: bool = False
    report_to: list[Literal["tensorboard", "wandb"]] = field(default_factory=lambda: ["tensorboard"])
    on_judge_error: Literal["stop", "missing"] = "stop"
    judge_timeout: float = 0.0
    policy: PolicySection = field(default_factory=PolicySection)
    data: DataSection = field(default_factory=DataSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    ppo: PPOSection = field(default_factory=PPOSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    renderer: RendererSection = field(default_factory=RendererSection)
    scorer: ScorerSection = field(default_factory=ScorerSection)
    recommendation: RecommendationSection = field(default_factory=RecommendationSection)
    retrieval: RetrievalSection = field(default_factory=RetrievalSection)
    warm_start: WarmStartSection = field(default_factory=WarmStartSection)
    rewards: list[RewardSection] = field(default_factory=list)
    watch: list[str] = field(default_factory=list)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    devices: DeviceSection = field(default_factory=DeviceSection)

    def __post_init__(self) -> None:
        """Checks what no section can check alone."""
        require(0 <= self.seed < 2**63, "seed", "a number in [0, 2^63)", self.seed)
        require(self.judge_timeout >= 0, "judge_timeout", "a number >= 0", self.judge_timeout)
        labels = [reward.label for reward in self.rewards]
        require(len(set(labels)) == len(labels), "rewards", "each reward once, no two of one function name", labels)
        for reward in self.rewards:
            target, others = reward.condition_on, [label for label in labels if label != reward.label]
            require(
                target in (None, "none", *others), f"rewards.{reward.label}.condition_on", f"one of {others}", target
            )
        group, most = self.sampling.group_size, self.sampling.max_new_tokens
        grouped = group >= 2 or self.algorithm.advantage in ("gae", "batch")
        require(grouped, "sampling.group_size", "at least 2 (a group is compared)", group)
        buffer = self.algorithm.overlong_buffer
        require(buffer <= most, "algorithm.overlong_buffer", f"at most sampling.max_new_tokens = {most}", buffer)
        named = buffer == 0 or "overlong" not in labels
        require(named, "rewards.overlong", "another name: the penalty of algorithm.overlong_buffer has it", labels)
        policy = self.policy
        alone = policy.quantised == "none" or (policy.lora.used and policy.mesh.size == 1)
        require(alone, "policy.quantised", "none without policy.lora, or over a mesh", policy.quantised)
        self._check_kl_control()
        self._check_mesh()
        self._check_recommendation()
        chunk = self.training.chunk_prompts
        require(
            chunk == 0 or self.training.prompts_per_batch % chunk == 0,
            "training.chunk_prompts",
            f"a divisor of prompts_per_batch = {self.training.prompts_per_batch}",
            chunk,
        )

    def _check_mesh(self) -> None:
        training, parts = self.training, self.policy.mesh.fsdp
        prompts = training.prompts_per_batch // (training.minibatches * training.accumulation)
        require(
            prompts % parts == 0,
            "policy.mesh.fsdp",
            f"a divisor of {prompts}, the prompts of one micro-batch (training.prompts_per_batch / minibatches / "
            "accumulation)",
            parts,
        )

    def _check_kl_control(self) -> None:
        rows, horizon = self.training.prompts_per_batch * self.sampling.group_size, self.ppo.kl_horizon
        steady = self.ppo.kl_target == 0 or rows <= horizon
        require(steady, "ppo.kl_horizon", f"at least one batch of {rows} completions", horizon)

    def _check_recommendation(self) -> None:
        ours, warm = self.task == "recommendation", self.warm_start
        made = self.policy.path != "new" or ours
        require(made, "policy.path", "a folder: only recommendation makes a new policy", self.policy.path)
        require(ours or warm.steps == 0, "warm_start.steps", f"0 for the task {self.task}", warm.steps)
        taught = warm.steps == 0 or warm.pairs in ("next", "forms") or self.recommendation.source == "dummy"
        require(taught, "warm_start.pairs", "next or forms: the others are of the dummy world alone", warm.pairs)


def from_dict(values: dict[str, Any]) -> Config:
    """Builds a `Config` from nested plain values (as `to_dict` gives them); unknown fields are errors."""
    sections = {
        name: kind for name, kind in _SECTIONS.items() if name in values and not dataclasses.is_dataclass(values[name])
    }
    built = dict(values)
    for name, kind in sections.items():
        built[name] = _build(kind, values[name] or {}, name)
    built["rewards"] = [
        reward if isinstance(reward, RewardSection) else _build(RewardSection, reward, "rewards")
        for reward in values.get("rewards") or []
    ]
    return _build(Config, built, "")


_SECTIONS: dict[str, type] = {
    "policy": PolicySection,
    "data": DataSection,
    "sampling": SamplingSection,
    "algorithm": AlgorithmSection,
    "ppo": PPOSection,
    "optimizer": OptimizerSection,
    "training": TrainingSection,
    "renderer": RendererSection,
    "scorer": ScorerSection,
    "recommendation": RecommendationSection,
    "retrieval": RetrievalSection,
    "warm_start": WarmStartSection,
    "evaluation": EvaluationSection,
    "devices": DeviceSection,
}


def _build(kind: type, values: dict[str, Any], name: str) -> Any:
    known = {member.name for member in dataclasses.fields(kind)}
    for key in values:
        require(key in known, f"{name}.{key}".strip("."), f"one of {sorted(known)}", key)
    values = dict(values)
    nested = {"lora": LoraSection, "new": NewPolicySection, "mesh": MeshSection} if kind is PolicySection else {}
    for field_name, section in nested.items():
        if isinstance(values.get(field_name), dict):
            values[field_name] = _build(section, values[field_name], f"policy.{field_name}")
    return kind(**values)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values of a `Config`, for YAML and JSON."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """A `Config` as YAML that `--config` reads back."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
