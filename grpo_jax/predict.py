"""A trained policy as a function from prompt to prompt.

As in

    from grpo_jax import load_rewriter

    rewrite = load_rewriter("runs/my_run")
    rewrite("a huge crimson disc")
    rewrite("What is this?", pictures=["cat.png"])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from grpo_jax.errors import UserError, extras_named


@extras_named()
def load_rewriter(run_dir: str | Path, checkpoint: str = "final") -> Callable[..., str]:
    """Restores the policy of a run.

    Args:
        run_dir: Run directory of a training run.
        checkpoint: "final", "best", "latest", or a step.

    Returns:
        rewrite(prompt, pictures=()) → the greedy rewrite, or the prompt itself where the policy's answer is unusable.
        Pictures are paths, bytes, of Pillow or arrays, as a row of the data has them.

    Raises:
        UserError: There is no such run or checkpoint, or a package that it needs is missing.
    """
    from grpo_jax.rollout.data import Row
    from grpo_jax.rollout.inputs.conversations import read_prompt, take_pictures
    from grpo_jax.rollout.inputs.encoding import make_encode
    from grpo_jax.rollout.texts import make_decode, policy_tokens
    from grpo_jax.runs.policy import restore_policy
    from grpo_jax.runs.seeing import eyes_of, make_see
    from grpo_jax.sampling.sampler import make_sampler
    from grpo_jax.sampling.samplers import named_ends, sampling_params

    config, policy, _ = restore_policy(run_dir, checkpoint, pictures=None)
    loaded = policy.loaded
    ends = named_ends(config.sampling, loaded, policy_tokens(config, loaded))
    sample = make_sampler(policy.functions, sampling_params(config.sampling, 1, 0.0), **ends)
    eyes = eyes_of(config, loaded)
    decode = make_decode(loaded.tokenizer, form=config.data.form, read=config.task.reader(config))
    keys = jax.random.split(jax.random.key(config.seed), 1)

    def rewrite(prompt: str, pictures: Sequence[Any] = ()) -> str:
        try:
            asked = read_prompt(prompt, take_pictures({"images": list(pictures)}, None), None)
        except ValueError as error:
            raise UserError(str(error)) from error
        row = Row(0, asked.text, {}, asked.pictures, asked.messages)
        vocabulary = loaded.config.vocab_size
        encode = make_encode(
            loaded.tokenizer, config.data, pad_id=loaded.pad_id, vocab_size=vocabulary, rows=[row], eyes=eyes
        )
        tokens, mask, shown = encode([row])
        seen = {} if shown is None else {"pictures": make_see(policy)(policy.variables, shown)[0]}
        samples = jax.device_get(sample(policy.variables, tokens, mask, keys, **seen))
        return decode(samples.tokens[0, 0][samples.mask[0, 0]], prompt)[1]

    return rewrite
