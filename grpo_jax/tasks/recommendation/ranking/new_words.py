"""New words in the tokenizer of a policy that is there already, warm-started from the titles that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.errors import UserError, one_line
from grpo_jax.models.hf.folder import load_tokenizer, resolve_folder
from grpo_jax.models.hf.weights import new_folder, refuse_foreign


def add_words(folder: str | Path, names: Sequence[str], titles: Sequence[str], out: str | Path) -> int:
    """Writes a policy's folder with the items' own words in its tokenizer, a token each.

    The row of a word, of the embedding and of the head alike, is the mean over its items of the mean over their title's
    tokens, so that a policy starts from what it knows of the words that the items have in common; without a title it is
    the mean of all rows.

    Args:
        folder: A Hugging Face folder or hub id of a model of text.
        names: I, the words of each item, with spaces between them.
        titles: I.
        out: Where to write; an earlier policy there is replaced.

    Returns:
        How many words were added; those that the tokenizer has already are left as they are.

    Raises:
        UserError: The folder cannot be loaded as a model of text, or `out` not written.
    """
    from tokenizers import AddedToken

    source, out = resolve_folder(folder), Path(out)
    if out.exists() and out.resolve() == source.resolve():
        raise UserError(f"--policy_out: expected another folder than the policy's, got {out}")
    refuse_foreign(out, "config.json", "a policy")
    tokenizer, model = load_tokenizer(source), _load(source)
    said = [tokenizer(title, add_special_tokens=False)["input_ids"] for title in titles]
    known = tokenizer.get_vocab()
    new = [word for word in dict.fromkeys(" ".join(names).split()) if word not in known]
    if not new:
        raise UserError(f"--policy: the tokenizer of {folder} has these words already: give it as policy.path")
    tokenizer.add_tokens([AddedToken(word, lstrip=True, normalized=False) for word in new])
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size), mean_resizing=False)
    items: dict[str, list[int]] = {word: [] for word in new}
    for row, name in enumerate(names):
        for word in set(name.split()) & items.keys():
            items[word].append(row)
    places = tokenizer.convert_tokens_to_ids(new)
    for table in _tables(model):
        _warm_start(table, places, [items[word] for word in new], said)
    try:
        with new_folder(out) as work:
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
    except OSError as error:
        raise UserError(f"cannot write the policy to {out}: {error}") from error
    return len(new)


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"--policy: cannot load {folder}: {one_line(str(error), 200)}") from error


def _tables(model: Any) -> list[Any]:
    """Embedding and head [V, D]; one of them where they are tied."""
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    return tables[:1] if tables[0] is tables[1] else tables


def _warm_start(table: Any, places: list[int], items: list[list[int]], said: list[list[int]]) -> None:
    """Writes the rows of the new words, in float32 on the way."""
    import torch

    with torch.no_grad():
        old = table[: min(places)].float().numpy()
        usual = old.mean(0)
        titles = np.stack([old[tokens].mean(0) if len(tokens) else usual for tokens in said])
        rows = np.stack([titles[of].mean(0) for of in items])
        table[places] = torch.from_numpy(rows).to(table.dtype)
