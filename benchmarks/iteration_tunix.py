"""GRPO iterations of google-tunix's GRPOLearner with its vanilla sampler; a worker of grpo_iteration.py.

Runs in an environment of its own (tunix_requirements.txt).
"""

from __future__ import annotations

import iteration_work as work
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast
from tunix.models.qwen2.model import ModelConfig
from tunix.models.qwen2.params import create_model_from_safe_tensors
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig


def model_config(case: work.Case) -> ModelConfig:
    return ModelConfig(
        num_layers=case.layers,
        vocab_size=case.vocabulary,
        embed_dim=case.hidden,
        hidden_dim=case.mlp,
        num_heads=case.heads,
        head_dim=case.head_size,
        num_kv_heads=case.kv_heads,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )


def make_cluster(given: work.Assignment) -> rl_cluster.RLCluster:
    """Actor and reference from one folder; actor and rollout share weights."""
    case, mesh = given.case, Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))

    def load():
        with mesh:
            return create_model_from_safe_tensors(str(given.folder), model_config(case), mesh)

    training = rl_cluster.RLTrainingConfig(
        # As in the other two: clipped at a norm of 1, then AdamW.
        actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(case.learning_rate, weight_decay=0.0)),
        eval_every_n_steps=1_000_000,
        max_steps=given.iterations,
        pbar_description=None,
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=case.new_tokens,
        max_prompt_length=case.prompt_tokens,
        kv_cache_size=case.prompt_tokens + case.new_tokens,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=[case.vocabulary + 1],  # outside the vocabulary: nothing ends a completion
    )
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh),
        training_config=training,
        rollout_config=rollout,
    )
    # Its bos_token is unset: Tunix would put one in front of every prompt.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(given.folder))
    return rl_cluster.RLCluster(actor=load(), reference=load(), tokenizer=tokenizer, cluster_config=config)


class Stopwatch:
    """Times a cluster's methods, and iterations between the moments in which the learner asks for the next prompts."""

    def __init__(self, cluster: rl_cluster.RLCluster, given: work.Assignment):
        self.rows: list[dict[str, float]] = []
        self.starts: list[float] = []
        self.given = given
        self.generate, self.reference, self.update = (
            cluster.generate,
            cluster.get_ref_per_token_logps,
            cluster.update_actor,
        )
        self.cluster = cluster
        cluster.generate, cluster.get_ref_per_token_logps = self.timed_generate, self.timed_reference
        cluster.update_actor = self.waited_update

    def prompts(self):
        for iteration in range(self.given.iterations):
            self.starts.append(self.given.now())
            self.rows.append({})
            yield {"prompts": np.array(work.prompt_texts(self.given.case, iteration))}

    def timed_generate(self, *args, **kwargs):
        # The sampler draws the same numbers in every step unless it is given another seed.
        self.cluster.cluster_config.rollout_config.seed = len(self.rows)
        start = self.given.now()
        written = self.generate(*args, **kwargs)
        self.rows[-1]["sampling"] = self.given.now() - start
        if any(len(tokens) != self.given.case.new_tokens for tokens in written.tokens):
            raise RuntimeError("a completion ended early")
        return written

    def timed_reference(self, *args, **kwargs):
        start = self.given.now()
        logprobs = jax.block_until_ready(self.reference(*args, **kwargs))
        self.rows[-1]["logprobs"] = self.given.now() - start
        return logprobs

    def waited_update(self, *args, **kwargs):
        self.update(*args, **kwargs)
        jax.block_until_ready(nnx.state(self.cluster.actor_trainer.model))

    def finish(self) -> list[dict[str, float]]:
        ends = [*self.starts[1:], self.given.now()]
        for row, start, end in zip(self.rows, self.starts, ends, strict=True):
            row["total"] = end - start
        return self.rows


if __name__ == "__main__":
    given = work.assignment()
    cluster = make_cluster(given)
    stopwatch = Stopwatch(cluster, given)
    algorithm = GRPOConfig(num_generations=given.case.group, num_iterations=1, beta=work.KL_COEF)

    def score(prompts, completions, **_):
        return [work.reward(given.case, text) for text in completions]

    learner = GRPOLearner(cluster, algorithm, score)
    learner.train(stopwatch.prompts())
    work.write_report(given, stopwatch.finish(), ("google-tunix", "jax", "jaxlib", "flax", "optax"))
