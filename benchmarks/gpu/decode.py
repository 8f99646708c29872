"""Completions per second: ours, transformers' generate and vLLM, against one read of the memory.

The floor of a step is the bytes that must come from memory (weights, the keys and values so far, each prompt's once for
its group) over the bandwidth measured in this process, or its products over the measured rate, if that is more.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import floor
import iteration_work
import jax
import numpy as np
import shapes
import timing
from outcome import Figures, Measurements, needs, needs_torch_beside_jax

from grpo_jax.models.policy import Policy
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams

GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 128
BATCHES = (64, 8, 256)
NARROW = 2  # bytes of a bfloat16, where `floor` counts four


def measurements(tiny: bool, size: str = "0.5B") -> Measurements:
    """The ceilings, ours at each batch, then the peers."""
    cases = {batch: case_of(size, batch, tiny) for batch in ((8,) if tiny else BATCHES)}
    rows: dict[str, Any] = {"ceilings": functools.partial(timing.ceiling_figures, tiny)}
    for batch, case in cases.items():
        rows[f"{size}, {batch} completions, grpo_jax"] = functools.partial(ours, case, tiny)
    for batch, case in cases.items():
        rows[f"{size}, {batch} completions, transformers"] = functools.partial(transformers_generate, case, tiny)
    rows[f"{size}, vLLM"] = functools.partial(vllm_generate, list(cases.values()), tiny)
    return rows


def case_of(size: str, batch: int, tiny: bool) -> iteration_work.Case:
    """So many completions at once, eight of each prompt."""
    lengths = (8, 4) if tiny else (PROMPT_TOKENS, NEW_TOKENS)
    return shapes.case(size, tiny, prompts=batch // GROUP, group=GROUP, prompt_tokens=lengths[0], new_tokens=lengths[1])


def floor_seconds(case: iteration_work.Case, tiny: bool) -> float:
    """Of writing all completions, the prompts' pass included, in bfloat16."""
    flops, size = floor.sampling_work(case)
    found = timing.ceilings(tiny)
    return max(flops / found["flops_per_second"], size * NARROW / floor.FLOAT / found["bytes_per_second"])


def figures(case: iteration_work.Case, seconds: float, tiny: bool) -> Figures:
    """Tokens per second, and how much of the time the floor is."""
    tokens = case.prompts * case.group * case.new_tokens
    return {
        "tokens_per_second": tokens / seconds,
        "milliseconds_per_step": 1e3 * seconds / case.new_tokens,
        "of_the_floor": floor_seconds(case, tiny) / seconds,
    }


def prompts_of(case: iteration_work.Case) -> np.ndarray:
    """i32 [P, L], random tokens."""
    rng = np.random.default_rng(0)
    return rng.integers(1, case.vocabulary - 1, (case.prompts, case.prompt_tokens)).astype(np.int32)


def ours(case: iteration_work.Case, tiny: bool) -> Figures:
    """Prefill and decoding, by the sampler of a run; the host's work and the copy of the layers included."""
    config = iteration_work.decoder_config(case)
    policy = Policy(config, compute_dtype="bfloat16")
    variables = shapes.variables(config, "bfloat16")
    sample = make_sampler(policy, SamplingParams(case.group, case.new_tokens), eos_ids=(), pad_id=0)
    tokens, keys = prompts_of(case), jax.random.split(jax.random.key(1), case.prompts)
    mask = np.ones(tokens.shape, bool)
    taken = timing.seconds(sample, variables, tokens, mask, keys)
    assert sample(variables, tokens, mask, keys).mask.all()  # no completion ended early
    return figures(case, taken, tiny)


def transformers_generate(case: iteration_work.Case, tiny: bool) -> Figures:
    """`generate` with its cache, each prompt repeated for its group."""
    device = needs_torch_beside_jax()
    needs("transformers")
    import torch

    model = shapes.torch_model(case, device, "bfloat16").eval()
    tokens = torch.tensor(prompts_of(case), dtype=torch.long, device=device).repeat_interleave(case.group, 0)
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, use_cache=True)

    def generate() -> Any:
        with torch.inference_mode():
            return model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=case.new_tokens, **settings
            )

    taken = timing.seconds(generate, rounds=2, wait=timing.wait_for_torch)
    written = generate().shape[1] - case.prompt_tokens
    assert written == case.new_tokens, f"{written} tokens were written"
    return figures(case, taken, tiny)


def vllm_generate(cases: list[iteration_work.Case], tiny: bool) -> Figures:
    """vLLM with dummy weights of the same shape, started once for all batches."""
    needs("vllm")
    from vllm import LLM
    from vllm import SamplingParams as Settings

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(published_config(cases[0])))
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            gpu_memory_utilization=0.5,
            max_model_len=512,
        )
        found: Figures = {}
        for case in cases:
            settings = Settings(n=case.group, max_tokens=case.new_tokens, ignore_eos=True, detokenize=False)
            prompts = [{"prompt_token_ids": row} for row in prompts_of(case).tolist()]
            taken = timing.seconds(
                lambda prompts=prompts, settings=settings: engine.generate(prompts, settings, use_tqdm=False),
                rounds=3,
                wait=lambda result: result,  # it comes back when all is written
            )
            batch = case.prompts * case.group
            found |= {f"{name}_{batch}": value for name, value in figures(case, taken, tiny).items()}
    return found


def published_config(case: iteration_work.Case) -> dict[str, Any]:
    """The shape as a folder's config.json says it."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": case.vocabulary,
        "hidden_size": case.hidden,
        "intermediate_size": case.mlp,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "max_position_embeddings": 1024,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
