"""A trained policy as a function from prompt to prompt.

from grpo_jax.predict import load_rewriter
rewrite = load_rewriter("runs/miniature")
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
    from grpo_jax.rollout.environment import make_decode, make_encode
    from grpo_jax.runs.parts import allowed_tokens, restore_policy, run_config
    from grpo_jax.sampling.sampler import SamplingParams, make_sampler

    config = run_config(run_dir)
    loaded, policy, _, variables, _ = restore_policy(run_dir, checkpoint)
    sample = make_sampler(
        policy,
        SamplingParams(1, config.sampling.max_new_tokens, 0.0),
        eos_ids=loaded.eos_ids,
        pad_id=loaded.pad_id,
        allowed_tokens=allowed_tokens(config, loaded),
    )
    encode, decode = make_encode(loaded.tokenizer, config, loaded.pad_id), make_decode(loaded.tokenizer, config)
    keys = jax.random.split(jax.random.key(config.seed), 1)

    def rewrite(prompt: str) -> str:
        tokens, mask = encode([prompt])
        samples = jax.device_get(sample(variables, tokens, mask, keys))
        return decode(samples.tokens[0, 0][samples.mask[0, 0]], prompt)[1]

    return rewrite
