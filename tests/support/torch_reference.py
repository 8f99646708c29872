"""Tiny random transformers models to compare with, with weights large enough to matter."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from flax.traverse_util import flatten_dict

from grpo_jax.models.hf.weights import name_table, tower_table

VOCAB = 96
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=[5, 7],
    pad_token_id=0,
    attn_implementation="eager",
)
ARCHITECTURES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75)
LONGROPE |= dict(short_factor=[1.0, 1.5, 2.5], long_factor=[4.0, 8.0, 16.0])
GEMMA = dict(head_dim=16, query_pre_attn_scalar=9, sliding_window=3)
OWN = {
    # Caps that are reached: scores and logits of such large weights go beyond them.
    "gemma2": GEMMA | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_text": GEMMA | dict(layer_types=["sliding_attention", "full_attention"]),
    "qwen3": dict(head_dim=16),
    "qwen3_vl": dict(head_dim=16),
    # The first layer is not rotated and sees three tokens back.
    # As Phi-4-mini: three quarters of each head turn, by LongRoPE's table.
    "phi3": dict(rope_parameters=LONGROPE, original_max_position_embeddings=32),
    "smollm3": dict(no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=3),
}
GPT2 = dict(
    vocab_size=VOCAB,
    n_embd=32,
    n_inner=48,
    n_layer=2,
    n_head=4,
    n_positions=64,
    bos_token_id=None,
    eos_token_id=5,
    pad_token_id=0,
    attn_implementation="eager",
)
VISION = {
    "qwen2_vl": (
        transformers.Qwen2VLConfig,
        transformers.Qwen2VLForConditionalGeneration,
        dict(depth=2, embed_dim=16, num_heads=2, hidden_size=32, mlp_ratio=2, patch_size=4),
        [1, 1, 2],
    ),
    # Windows of 2 x 2 merged tokens; every other layer sees the whole picture.
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLConfig,
        transformers.Qwen2_5_VLForConditionalGeneration,
        dict(depth=3, hidden_size=16, num_heads=2, out_hidden_size=32, intermediate_size=24, patch_size=4)
        | dict(window_size=16, fullatt_block_indexes=[1]),
        [1, 1, 2],
    ),
    # A table of 5 x 5 positions, smaller and larger than pictures; deepstack from the first and the third layer.
    "qwen3_vl": (
        transformers.Qwen3VLConfig,
        transformers.Qwen3VLForConditionalGeneration,
        dict(depth=4, hidden_size=16, num_heads=2, out_hidden_size=32, intermediate_size=24, patch_size=4)
        | dict(num_position_embeddings=25, deepstack_visual_indexes=[0, 2]),
        [2, 3, 3],
    ),
}


def model(architecture: str, **overrides):
    """A torch model; parameters ~ N(0, 0.2), norms around 1, so that every part shows in the logits."""
    torch.manual_seed(0)
    if architecture == "gpt2":
        config = transformers.GPT2Config(**(GPT2 | overrides))
        return _shaken(transformers.GPT2LMHeadModel(config))
    fields = SHAPE | OWN.get(architecture, {}) | overrides
    if architecture in ARCHITECTURES:
        config_class, model_class = ARCHITECTURES[architecture]
        built = model_class(config_class(**copy.deepcopy(fields)))
    else:
        config_class, model_class, vision, sections = VISION[architecture]
        tied = fields.pop("tie_word_embeddings", False)
        attention = fields.pop("attn_implementation")
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
        ids = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
        config = config_class(
            text_config=fields | {"rope_parameters": fields.get("rope_parameters", rope)},
            vision_config=vision,
            tie_word_embeddings=tied,
            attn_implementation=attention,
            **ids,
        )
        built = model_class(config)
    return _shaken(built)


def _shaken(built):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(built.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
            around = 0 if "gemma" in built.config.model_type else 1  # Gemma's norms multiply by 1 + weight
            weight.copy_(around + 0.3 * noise if norm else 0.2 * noise)
    return built.eval()


def folder(path: Path, architecture: str, *, dtype: torch.dtype = torch.float32, **overrides) -> Path:
    """The same, saved as a folder."""
    shard = overrides.pop("max_shard_size", "1GB")
    model(architecture, **overrides).to(dtype).save_pretrained(path, max_shard_size=shard)
    return path


def logits(torch_model, tokens: np.ndarray, mask: np.ndarray, **pictures) -> torch.Tensor:
    """Logits [B, S, V] of left-padded tokens [B, S], positions counted from the first real token.

    With ``pixel_values`` and ``image_grid_thw`` they are those that the model gives pictures.
    """
    ids, attention = torch.tensor(tokens, dtype=torch.long), torch.tensor(mask, dtype=torch.long)
    if pictures:
        pictures["mm_token_type_ids"] = (ids == torch_model.config.image_token_id).int()
        return torch_model(input_ids=ids, attention_mask=attention, use_cache=False, **pictures).logits
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    if torch_model.config.model_type in VISION:
        positions = positions[None].expand(3, -1, -1)
    return torch_model(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False).logits


def group_batch(seed: int = 0, prompts: int = 3, group: int = 2, length: int = 6, steps: int = 5):
    """Prompts of different lengths and completions that end at different steps, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    prompt_tokens = rng.integers(1, 90, (prompts, length)).astype(np.int32)
    pads = np.minimum(np.arange(prompts) * 2, length - 1)
    prompt_mask = np.arange(length)[None] >= pads[:, None]
    tokens = rng.integers(1, 90, (prompts, group, steps)).astype(np.int32)
    ends = rng.integers(1, steps + 1, (prompts, group))
    ends[0, 0] = steps
    return prompt_tokens, prompt_mask, tokens, np.arange(steps) < ends[..., None]


def unshared(prompt_tokens, prompt_mask, tokens, mask):
    """Every completion behind its own copy of the prompt: tokens and mask [P·G, L+T]."""
    group = tokens.shape[1]

    def join(prompt, completion):
        both = np.concatenate([np.repeat(prompt[:, None], group, 1), completion], axis=-1)
        return both.reshape(-1, both.shape[-1])

    return join(prompt_tokens, tokens), join(prompt_mask, mask)


def completion_logits(model, batch, **pictures) -> torch.Tensor:
    """Logits [P, G, T, V] of a batch's completions (`group_batch`), each behind its own prompt."""
    tokens = batch[2]
    whole = logits(model, *unshared(*batch), **pictures)
    return whole[:, -tokens.shape[-1] - 1 : -1].reshape(*tokens.shape, -1)


def grpo(predicted, batch, advantages, noise):
    """GRPO with a k3 penalty: log-probabilities [P, G, T] at temperature 0.8 and the loss, whose gradient is taken."""
    tokens, mask = torch.tensor(batch[2], dtype=torch.long), torch.tensor(batch[3])
    logprobs = torch.log_softmax(predicted / 0.8, -1).gather(-1, tokens[..., None])[..., 0]
    old, ref = (logprobs.detach() + torch.tensor(n) for n in noise)
    ratio, scale = (logprobs - old).exp(), torch.tensor(advantages)[..., None]
    policy = -torch.minimum(ratio * scale, ratio.clamp(0.8, 1.3) * scale)
    penalty = (ref - logprobs).exp() - (ref - logprobs) - 1
    per_token = (policy + 0.1 * penalty) * mask
    loss = (per_token.sum(-1) / mask.sum(-1)).mean()
    loss.backward()
    return logprobs, loss


def assert_gradients_agree(model, config, grads) -> None:
    """Gradients of the parameters, a vision tower's among them, are those of torch to 1e-3 of the largest."""
    leaves = flatten_dict(grads)
    parameters = {name.replace("model.language_model.", "model."): w.grad for name, w in model.named_parameters()}
    table = name_table(config, parameters)
    if "visual" in grads:
        table |= tower_table(config, parameters)
        assert table.keys() == parameters.keys()
    assert len(table) >= 15
    for name, place in table.items():
        got = place.tensor(np.asarray(leaves[place.path])[place.index])
        expected = parameters[name].numpy()
        # k_proj.bias shifts all scores of a query alike until the rotation: small but not zero.
        assert np.abs(got - expected).max() <= 1e-3 * np.abs(expected).max() + 1e-7, name
        assert np.abs(expected).max() > 0, name


def greedy_answers(model, folder: Path, prompts: Sequence[str], **options) -> list[str]:
    """Return transformers' greedy answer to each prompt, through the chat template of a folder."""
    tokenizer, texts = transformers.AutoTokenizer.from_pretrained(folder), []
    for prompt in prompts:
        said = [{"role": "user", "content": prompt}]
        asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            out = model.generate(**asked, do_sample=False, **options)
        texts.append(tokenizer.decode(out[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts
