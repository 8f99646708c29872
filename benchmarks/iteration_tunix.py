"""GRPO iterations of Tunix's GRPOLearner with its own sampler ("vanilla"); a worker of grpo_iteration.py.

Words of a variant: "decoder" (`RematConfig.DECODER`, its gradient checkpointing). The phases are timed by wrapping the
cluster's methods. Weights come from the folder by Tunix's own loader, policy and reference apart, as without adapters.
"""

from __future__ import annotations

import json

import iteration_work as work
import jax
import numpy as np
import optax
from flax import nnx
from transformers import PreTrainedTokenizerFast
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig


class TimedCluster(rl_cluster.RLCluster):
    """The cluster with a stopwatch around generation and the reference's log-probabilities."""

    rows: list[dict[str, float]]

    def __init__(self, *, now, **kwargs):
        self.now = now
        super().__init__(**kwargs)

    def generate(self, *args, **kwargs):
        start = self.now()
        written = super().generate(*args, **kwargs)
        self.rows[-1] |= {"sampling": self.now() - start, "tokens": sum(map(len, written.tokens))}
        return written

    def get_ref_per_token_logps(self, *args, **kwargs):
        start = self.now()
        seen = jax.block_until_ready(super().get_ref_per_token_logps(*args, **kwargs))
        self.rows[-1]["logprobs"] = self.now() - start
        return seen


class TimedLearner(GRPOLearner):
    """The learner with a row for each global step: with num_iterations = 1 that is one iteration."""

    def _run_global_step(self, *args, **kwargs):
        cluster = self.rl_cluster
        start = cluster.now()
        cluster.rows.append({})
        super()._run_global_step(*args, **kwargs)
        jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
        cluster.rows[-1]["total"] = cluster.now() - start


def load(given: work.Assignment, mesh: jax.sharding.Mesh) -> qwen2.Qwen2:
    """The folder's model, in float32."""
    case, said = given.case, json.loads((given.folder / "config.json").read_text())
    config = qwen2.ModelConfig(
        num_layers=case.layers,
        vocab_size=case.vocabulary,
        embed_dim=case.hidden,
        hidden_dim=case.mlp,
        num_heads=case.heads,
        head_dim=case.head_size,
        num_kv_heads=case.kv_heads,
        rope_theta=int(said["rope_parameters"]["rope_theta"]),
        norm_eps=said["rms_norm_eps"],
        use_tied_embedding=True,
        remat_config=qwen2.RematConfig.DECODER if "decoder" in given.variant.split() else qwen2.RematConfig.NONE,
    )
    return qwen2_params.create_model_from_safe_tensors(str(given.folder), config, mesh)


def make_learner(given: work.Assignment) -> TimedLearner:
    case = given.case
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(given.folder))
    tokenizer.pad_token = "<pad>"  # outside the vocabulary: Tunix masks every token that equals it
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(case.learning_rate, weight_decay=0.0)),
        eval_every_n_steps=given.iterations + 1,
        max_steps=given.iterations,
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=case.new_tokens,
        temperature=1.0,
        max_prompt_length=case.prompt_tokens,
        kv_cache_size=case.prompt_tokens + case.new_tokens,
        eos_tokens=[case.vocabulary + 1 if case.end is None else case.end],  # outside nothing ends a completion
    )
    cluster = TimedCluster(
        now=given.now,
        actor=load(given, mesh),
        reference=load(given, mesh),
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh), training_config=training, rollout_config=rollout
        ),
    )
    cluster.rows = []
    algorithm = GRPOConfig(
        num_generations=case.group, num_iterations=1, beta=work.KL_COEF, kl_loss_mode="low_var_kl", epsilon=0.2
    )

    def reward(prompts, completions, **_):
        return [work.reward(case, text) for text in completions]

    return TimedLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=reward)


if __name__ == "__main__":
    given = work.assignment()
    if given.case.picture:
        raise SystemExit("Tunix has no Qwen2-VL: take a case without pictures")
    learner = make_learner(given)
    learner.train([{"prompts": np.array(work.prompt_texts(given.case, i))} for i in range(given.iterations)])
    rows, case = learner.rl_cluster.rows, given.case
    if case.end is None and any(row["tokens"] != case.prompts * case.group * case.new_tokens for row in rows):
        raise RuntimeError("a completion ended early")
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(learner.rl_cluster.actor_trainer.model, nnx.Param))}
    if dtypes != {"float32"}:
        raise RuntimeError(f"expected float32 weights, got {dtypes}")
    work.write_report(given, rows, ("google-tunix", "jax", "jaxlib", "flax", "optax"))
