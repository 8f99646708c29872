"""The parts of a recommendation run: data, retriever, a new policy's folder, rewards from ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config import Config, RetrievalSection, RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.chosen import Chosen, own_reward, ready, resolve_conditions
from grpo_jax.rollout.environment import make_decode, make_encode, make_score
from grpo_jax.rollout.rewards import Reward, load_reward
from grpo_jax.rollout.rollout import Environment
from grpo_jax.tasks.recommendation import dummy, metrics
from grpo_jax.tasks.recommendation.catalogue import Catalogue
from grpo_jax.tasks.recommendation.dataset import Dataset, load_dataset
from grpo_jax.tasks.recommendation.examples import asking_pairs, title_pairs
from grpo_jax.tasks.recommendation.policy import NOT_A_WORD, write_policy
from grpo_jax.tasks.recommendation.rewards import make_reward, reward_columns, where_ranked

DEFAULT_REWARDS = (RewardSection("ndcg"),)
DEFAULT_WATCH = ("ndcg@10", "hr@10", "ndcg@5", "hr@5", "mrr")
RANK = "rank"
"""Always watched, last: the tables are made of it."""

_MEASURES: dict[str, Callable[..., np.ndarray]] = {"hr": metrics.hit, "ndcg": metrics.ndcg, "mrr": metrics.mrr}


class Recommendation(NamedTuple):
    """What the task works on: the data, and what ranks the catalogue against a text."""

    dataset: Dataset
    retriever: Any


def load_data(config: Config, say: Callable[..., None]) -> Dataset:
    """Reads users, items and prompts.

    Raises:
        UserError: Files are missing or bad.
    """
    dataset = load_dataset(config.recommendation, held_out=config.data.held_out)
    catalogue = dataset.catalogue
    say("catalogue", f"{config.recommendation.source}: {len(catalogue):,} items, {len(dataset.users):,} users")
    for note in dataset.notes:
        say("", note)
    return dataset


def open_task(
    config: Config, dataset: Dataset, bridges: Callable[[str], Any], say: Callable[..., None]
) -> Recommendation:
    """Opens the retriever, which tests itself.

    Raises:
        UserError: The service is not there or holds another catalogue, or titles do not retrieve themselves.
    """
    section = config.retrieval
    retriever, share = _open(section, dataset.catalogue, bridges("retrieval"))
    where = "in this process" if section.backend == "local" else f"service {section.service!r} over Ray"
    tested = f"self-test: {share:.1%} of titles asked for retrieve themselves"
    say("retrieval", f"{section.encoder}, {where}, ties {section.ties}; {tested}")
    return Recommendation(dataset, retriever)


def _open(section: RetrievalSection, catalogue: Catalogue, retrieval: Any) -> tuple[Any, float]:
    try:
        return retrieval.open_retriever(
            catalogue.titles,
            backend=section.backend,
            encoder=section.encoder,
            ties=section.ties,
            scale=retrieval.Scale(temperature=section.temperature),
            patience=retrieval.Patience(attempts=section.attempts, budget=section.budget, window=section.window),
            cache=section.cache,
            encoder_device=section.device,
            service=section.service,
            address=section.address,
            timeout=section.timeout,
        )
    except retrieval.RetrievalError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"retrieval: {error}") from error


def require_same_retrieval(
    task: Recommendation | None, saved: Mapping[str, str] | None, bridges: Callable[[], Callable[[str], Any]]
) -> None:
    """Refuses a checkpoint whose ranks came from another catalogue or encoder, and says which."""
    if task is not None and saved is not None:
        bridges()("retrieval").require_same(saved, task.retriever.fingerprint)


# ------------------------------------------------------------------------------------------------------ policy


def make_new_policy(config: Config, catalogue: Catalogue, folder: Path) -> None:
    """Writes the folder of policy.path "new", unless the run has it already."""
    if (folder / "config.json").is_file():
        return
    section = config.policy.new
    write_policy(
        folder,
        words_of(config, catalogue),
        architecture=section.architecture,
        width=section.width,
        layers=section.layers,
        heads=section.heads,
        window=section.window,
        seed=config.seed,
        plain_words=True,
    )


def words_of(config: Config, catalogue: Catalogue) -> list[str]:
    """What a new policy can read and say: words of the prompts' frame, then those of titles, frequent ones first."""
    section = config.recommendation
    frame = section.template.replace("{history}", " ").replace("{last}", " ")
    marks = _words(frame) + _words(section.separator)
    counts = Counter(word for title in catalogue.titles for word in _words(title))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: config.policy.new.vocabulary or None]
    return list(dict.fromkeys([*marks, *frequent]))


def _words(text: str) -> list[str]:
    return re.sub(NOT_A_WORD, " ", text.lower()).split()


def warm_start_pairs(config: Config, dataset: Dataset) -> list[tuple[str, str]]:
    """(prompt, text) pairs that the warm start teaches."""
    section, rows = config.warm_start, dataset.prompts.train
    if section.pairs == "lessons":
        return dummy.lessons(rows, dataset.catalogue, seed=config.seed)
    if section.pairs == "hearsay":
        return dummy.hearsay(rows, dataset.catalogue, seed=config.seed)
    if section.pairs == "forms":
        return asking_pairs(rows, characters=section.title_characters, seed=config.seed)
    return title_pairs(rows, characters=section.title_characters)


# ------------------------------------------------------------------------------------------------- environment


def make_environment(config: Config, loaded: Any, task: Recommendation, chosen: Chosen) -> Environment:
    """The environment of the task.

    Args:
        config: The run.
        loaded: The policy's folder, for its tokenizer.
        task: Data and retriever.
        chosen: Its rewards and watched measures.
    """
    functions, watch = ([make(None) for make in makes] for makes in (chosen.rewards, chosen.watch))
    missing = config.on_judge_error == "missing"
    measure = make_measure(task.retriever)
    score = make_score(chosen.names, functions, chosen.watch_names, watch, missing=missing, measure=measure)
    rows = [row for part in task.dataset.prompts for row in part]
    encode = make_encode(loaded.tokenizer, config, loaded.pad_id, rows)
    decode = make_decode(loaded.tokenizer, config)
    return Environment(encode, decode, None, score, chosen.names, chosen.watch_names)


def choose_rewards(config: Config, given: Mapping[str, Reward], items: int) -> Chosen:
    """The rewards of the task and what it watches; none needs a judge but the ranks.

    Args:
        config: The run.
        given: Functions in place of what the config names, by label.
        items: How many items the catalogue has.

    Raises:
        UserError: A name is unknown, a function is not found, or an option is not one of it.
    """
    sections = resolve_conditions(tuple(config.rewards) or DEFAULT_REWARDS)
    watch_names = (*(config.watch or DEFAULT_WATCH), RANK)
    rewards = tuple(ready(_reward(section, given, items)) for section in sections)
    return Chosen(sections, rewards, watch_names, tuple(ready(_watched(name)) for name in watch_names))


def make_measure(retriever: Any) -> Callable[[Sequence[str], Mapping[str, Any]], dict[str, Any]]:
    """measure(completions, columns) → the columns "rank" and "probability"; NaN where the retriever failed."""

    def measure(completions: Sequence[str], columns: Mapping[str, Any]) -> dict[str, Any]:
        answer = retriever.score_ranks(completions, columns["target_row"], columns["history"])
        return reward_columns(answer.rank, answer.probability)

    return measure


def _reward(section: RewardSection, given: Mapping[str, Reward], items: int) -> Reward:
    own = own_reward(section, given)
    if own is not None:
        return where_ranked(own)
    try:
        return make_reward(section.name, items=items, options=section.options)
    except ValueError as error:
        raise UserError(
            f"rewards.{section.name}: {error}; one of your own is package.module:function or file.py:function"
        ) from error


def _watched(name: str) -> Reward:
    """A measure by its name, such as ndcg@10, or the user's own by import path."""
    if name == RANK:
        return lambda rank, **_: [None if np.isnan(value) else value for value in rank]
    if ":" in name:
        return where_ranked(load_reward(name))
    measure, _, k = name.partition("@")
    known = measure in _MEASURES and (k.isdigit() and int(k) > 0 if k else name == "mrr")
    if not known:
        raise UserError(f"watch: expected hr@K, ndcg@K, mrr, mrr@K or package.module:function, got {name!r}")
    cutoff = int(k) if k else None

    def watched(rank: Sequence[float], **_: Any) -> list[float | None]:
        values = _MEASURES[measure](np.asarray(rank, np.float64), k=cutoff)
        return [None if np.isnan(value) else float(value) for value in values]

    return watched
