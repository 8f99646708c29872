"""A trained policy as a function from prompt to prompt.

from grpo_jax import load_rewriter
rewrite = load_rewriter("runs/my_run")
rewrite("a huge crimson disc")
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from grpo_jax.errors import extras_named


@extras_named()
def load_rewriter(run_dir: str | Path, checkpoint: str = "final") -> Callable[[str], str]:
    """Restores the policy of a run.

    Args:
        run_dir: Run directory of a training run.
        checkpoint: "final", "best", or a step.

    Returns:
        rewrite(prompt) → the greedy rewrite, or the prompt itself where the policy's answer is unusable.

    Raises:
        UserError: There is no such run or checkpoint, or a package that it needs is missing.
    """
    from grpo_jax.rollout.texts import make_decode, make_encode
    from grpo_jax.runs.parts import policy_tokens
    from grpo_jax.runs.policy import restore_policy
    from grpo_jax.sampling.sampler import SamplingParams, make_sampler

    config, policy, _ = restore_policy(run_dir, checkpoint)
    loaded = policy.loaded
    sample = make_sampler(
        policy.functions,
        SamplingParams(1, config.sampling.max_new_tokens, 0.0),
        eos_ids=loaded.eos_ids,
        pad_id=loaded.pad_id,
        allowed_tokens=policy_tokens(config, loaded),
    )
    encode = make_encode(loaded.tokenizer, config.data, pad_id=loaded.pad_id, vocab_size=loaded.config.vocab_size)
    decode = make_decode(loaded.tokenizer, form=config.data.form, read=config.task.reader(config))
    keys = jax.random.split(jax.random.key(config.seed), 1)

    def rewrite(prompt: str) -> str:
        tokens, mask = encode([prompt])
        samples = jax.device_get(sample(policy.variables, tokens, mask, keys))
        return decode(samples.tokens[0, 0][samples.mask[0, 0]], prompt)[1]

    return rewrite
