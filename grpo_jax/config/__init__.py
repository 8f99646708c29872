"""The config of a run: the sections that tasks share, and how they are read and written."""

from grpo_jax.config.build import build, differences, identity, to_dict, to_yaml
from grpo_jax.config.judge import Judge, PoolSection
from grpo_jax.config.run import Config, make_config
from grpo_jax.config.sections import (
    AlgorithmSection,
    DataSection,
    EvaluationSection,
    LoraSection,
    MeshSection,
    NewPolicySection,
    OptimizerSection,
    PolicySection,
    PPOSection,
    RewardSection,
    SamplingSection,
    SFTSection,
    TrainingSection,
)

__all__ = [
    "AlgorithmSection",
    "Config",
    "DataSection",
    "EvaluationSection",
    "Judge",
    "LoraSection",
    "MeshSection",
    "NewPolicySection",
    "OptimizerSection",
    "PPOSection",
    "PolicySection",
    "PoolSection",
    "RewardSection",
    "SFTSection",
    "SamplingSection",
    "TrainingSection",
    "build",
    "differences",
    "identity",
    "make_config",
    "to_dict",
    "to_yaml",
]
