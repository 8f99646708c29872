"""A small untrained policy for small vocabularies: a Llama folder in which every word is one token."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from grpo_jax.config.sections import NewPolicySection

PAD, END, UNKNOWN, NEXT = "<|pad|>", "<|end|>", "<|unknown|>", "<|next|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|next|>{% endif %}"
)


def write_policy(
    folder: str | Path,
    words: Iterable[str],
    section: NewPolicySection = NewPolicySection(),
    *,
    seed: int = 0,
    plain_words: bool = False,
    vectors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a Hugging Face folder with random weights and a tokenizer of whole words; returns the folder.

    Text is split at white space. A word or special token of `words` is one token, any other word is "<|unknown|>".
    Decoding joins tokens with spaces.

    Args:
        words: The vocabulary; repeated words count once.
        plain_words: Lower-case text and remove punctuation (`plain_normalizer`).
        vectors: Initial embeddings of words, f32 [width] each, in place of random ones. The first layer then adds a
            mean of the context, weighted towards recent words (`_recent_mean`), so that near vectors rank high. That
            uses the vectors' last coordinate.
    """
    words = list(dict.fromkeys(words))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = [PAD, END, UNKNOWN, NEXT, *words]
    width, layers, window = section.width, section.layers, section.window
    _write_tokenizer(folder, vocabulary, window, plain_words)
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": section.mlp or 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": window,
        "vocab_size": len(vocabulary),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    tensors = _llama_tensors(seed, len(vocabulary), width, layers, config["intermediate_size"])
    rows = {word: row for row, word in enumerate(vocabulary)}
    for word, vector in (vectors or {}).items():
        tensors["model.embed_tokens.weight"][rows[word]] = vector
    if vectors:
        tensors |= _recent_mean(tensors["model.embed_tokens.weight"], [rows[word] for word in vectors], section.heads)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_tokenizer(folder: Path, vocabulary: list[str], window: int, plain_words: bool) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if plain_words:
        backend.normalizer = plain_normalizer()
    backend.add_special_tokens([AddedToken(token, special=True) for token in vocabulary[:4]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[NEXT],
        padding_side="left",
        model_max_length=window,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


@functools.cache
def plain_normalizer():
    """Return the tokenizer's step to plain words: Python's `lower` and `\\w` differ outside Latin."""
    from tokenizers import Regex, normalizers

    marks = Regex(r"[^\w|]+")  # all but letters, their accents, digits, and the | that may stand between titles
    return normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(marks, " ")])


def _llama_tensors(seed: int, vocabulary: int, width: int, layers: int, inside: int) -> dict[str, np.ndarray]:
    generator, ones = np.random.Generator(np.random.PCG64(seed)), np.ones(width, np.float32)

    def normal(*shape: int) -> np.ndarray:
        return (0.02 * generator.standard_normal(shape)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(vocabulary, width), "model.norm.weight": ones}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors |= {f"{name}.self_attn.{part}_proj.weight": normal(width, width) for part in "qkvo"}
        tensors |= {f"{name}.mlp.{part}_proj.weight": normal(inside, width) for part in ("gate", "up")}
        tensors[f"{name}.mlp.down_proj.weight"] = normal(width, inside)
        tensors |= {f"{name}.{part}_layernorm.weight": ones for part in ("input", "post_attention")}
    return tensors


def _recent_mean(embeddings: np.ndarray, words: Sequence[int], heads: int) -> dict[str, np.ndarray]:
    """Return a first layer that outputs the mean of these words, each with half the weight of the next newer one.

    All words share the last coordinate, and "<|next|>" has only this one, which makes its query. Attention thus depends
    only on the distance, through slow rotary angles. The coordinate is not in the output and affects no likelihood. The
    norm before scales unit vectors to length √width; the layer rescales them to 1.
    """
    width = embeddings.shape[1]
    table = embeddings.copy()
    table[words, -1] = np.linalg.norm(table[words, :-1], axis=1)
    table[words] /= np.maximum(np.linalg.norm(table[words], axis=1, keepdims=True), 1e-6)
    table[3] = np.eye(width)[-1]  # "<|next|>"
    angles = 1e4 ** (-np.arange(0, width // heads, 2) * heads / width)
    slow = (angles > 0.09) & (angles < 1)
    query = np.concatenate([slow, np.zeros(len(slow))]) * np.sqrt(4 * np.sqrt(width // heads) / max(slow.sum(), 1))
    passed = np.diag((np.arange(width) < width - 1).astype(np.float32))
    reads = np.zeros((2, width, width), np.float32)
    reads[:, :, -1] = np.tile(query, heads) / np.sqrt([[width], [width / 2]])
    name = "model.layers.0.self_attn"
    return {
        "model.embed_tokens.weight": table,
        f"{name}.q_proj.weight": reads[0],
        f"{name}.k_proj.weight": reads[1],
        f"{name}.v_proj.weight": passed,
        f"{name}.o_proj.weight": np.eye(width, dtype=np.float32) / np.sqrt(np.float32(width)),
        "model.norm.weight": passed.diagonal().copy(),
    }
