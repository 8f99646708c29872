"""The samplers of a config, and their constraints: choices and stop strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from grpo_jax.config.fields import require
from grpo_jax.config.sections import EvaluationSection, SamplingSection
from grpo_jax.core.trie import Trie
from grpo_jax.errors import UserError, one_line
from grpo_jax.models.hf.chat import Tokenizer, decoded, end_of_turn, plain_tokens, special_ids
from grpo_jax.models.hf.folder import PolicyFolder
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import gather
from grpo_jax.models.variables import PyTree
from grpo_jax.sampling.decoding import START, Samples
from grpo_jax.sampling.episodes import EpisodeSampler, make_episode_sampler
from grpo_jax.sampling.ranking import Ranking, make_ranker
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams

Sampler = Callable[..., Samples] | EpisodeSampler


class Samplers(NamedTuple):
    """The samplers of a run: of groups in training; greedy and k sampled completions in evaluation.

    They are functions of `make_sampler`, or `EpisodeSampler`s in multi-turn tasks. `rank` ranks a task's choices
    (`ranking.make_ranker`); None without choices.
    """

    training: Sampler
    greedy: Sampler
    sampled: Sampler
    rank: Callable[..., Ranking] | None = None


def sampling_params(section: SamplingSection, group_size: int, temperature: float) -> SamplingParams:
    """Return the sampling parameters of a config's section; greedy ones (temperature 0) have no top-k, top-p, min-p."""
    most, keep = section.max_new_tokens, section.sampling_mask == "keep"
    if not temperature:
        return SamplingParams(group_size, most, temperature)
    return SamplingParams(group_size, most, temperature, section.top_k, section.top_p, section.min_p, keep)


def measured_section(section: SamplingSection, evaluation: EvaluationSection) -> SamplingSection:
    """Return the section for an evaluation's sampled completions: k per prompt, one by one, else as in training."""
    temperature = evaluation.temperature or section.temperature
    return section.replace(group_size=max(evaluation.samples, 1), temperature=temperature, sampling_mask="none")


def make_samplers(
    section: SamplingSection,
    evaluation: EvaluationSection,
    policy: Policy,
    allowed: np.ndarray | None,
    trie: Trie | None = None,
) -> Samplers:
    """Make the samplers of training and evaluation; results of a mesh are gathered for the host.

    `allowed` bool [V] are the tokens that may be generated, None for every token; `trie` holds the task's choices.
    """
    ends = named_ends(section, policy.folder, allowed)
    rank = None
    if trie is not None:
        require(section.turns == 1, "sampling.turns", "1: the task lists the possible texts", section.turns)
        unmasked = section.sampling_mask == "none"
        require(unmasked, "sampling.sampling_mask", "none: the task lists the possible texts", section.sampling_mask)
        ranker = make_ranker(policy, pad_id=ends["pad_id"], trie=trie, temperature=section.temperature)
        rank = _gathered(ranker, policy.mesh)

    def sampler(section: SamplingSection, group_size: int, temperature: float) -> Sampler:
        params = sampling_params(section, group_size, temperature)
        if section.turns > 1:
            turns = make_episode_sampler(policy, params, **ends)
            return EpisodeSampler(*(_gathered(turn, policy.mesh, carries=True) for turn in turns))
        return _gathered(make_sampler(policy, params, **ends, trie=trie), policy.mesh)

    measured = measured_section(section, evaluation)
    return Samplers(
        sampler(section, section.group_size, section.temperature),
        sampler(section, 1, 0.0),
        sampler(measured, measured.group_size, measured.temperature),
        rank,
    )


def named_ends(section: SamplingSection, loaded: PolicyFolder, allowed: np.ndarray | None) -> dict[str, PyTree]:
    """Return the keyword arguments of `make_sampler` for allowed tokens and ends."""
    return {
        "eos_ids": loaded.eos_ids,
        "pad_id": loaded.pad_id,
        "allowed_tokens": allowed,
        "stops": stops_of(section.stop, loaded.tokenizer, loaded.config.vocab_size),
    }


def stops_of(stops: list[str], tokenizer: Tokenizer, vocab_size: int) -> np.ndarray | None:
    """Return the `stop_table` of sampling.stop for a vocabulary of V; None without stop strings.

    UserError if a stop string contains a special token, which decoding skips. UserError too if the tokenizer's text
    is not the concatenation of its tokens.
    """
    if not stops:
        return None
    marks = tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))
    held = [mark for mark in marks if any(mark in stop for stop in stops)]
    pieces = token_pieces(tokenizer, vocab_size)
    if held or pieces is None:
        reason = (
            f"no text shows the special token {held[0]}: leave it out, or make it an eos_token_id of the folder"
            if held
            else "this policy's tokenizer does not write texts token by token: leave it out"
        )
        raise UserError(f"sampling.stop: got {one_line(repr(stops), 60)}, and {reason}")
    return stop_table(stops, pieces.first, pieces.later)


def _gathered(sample: Callable[..., PyTree], mesh: Mesh | None, *, carries: bool = False) -> Callable[..., PyTree]:
    """Gather a sampler's results; the carried state of an episode sampler stays in place."""

    def gathered(*arguments: PyTree, **named: PyTree) -> PyTree:
        made = sample(*arguments, **named)
        return (gather(made[0], mesh), made[1]) if carries else gather(made, mesh)

    return gathered


def completion_tokens(tokenizer: Tokenizer, text: str, eos_ids: Sequence[int], *, plain: bool, gap: bool) -> list[int]:
    """Encode a text as a completion, including the EOS token.

    EOS is that of the chat template (`end_of_turn`), after a `plain` prompt the tokenizer's own. Special tokens in the
    text stay text (`plain_tokens`). An ordinary token among `eos_ids`, such as a newline, ends the completion, as in
    sampling. `gap` adds a leading space, which words need after plain text but not after a special token.
    """
    template = "" if plain else str(getattr(tokenizer, "chat_template", None) or "")
    end = end_of_turn(tokenizer, tuple(eos_ids), template)
    ids = [*plain_tokens(tokenizer, f" {text}" if gap else text), end]
    stop = next(place for place, token in enumerate(ids) if token in eos_ids)
    return ids[: stop + 1]


def stop_table(stops: Sequence[str], first: Sequence[bytes], later: Sequence[bytes]) -> np.ndarray:
    """Compile stop strings to an automaton over tokens: next states int32 [S, V], from `START`.

    Over bytes it is the Aho-Corasick automaton (1975): a state is the longest prefix of a stop string that is a suffix
    of the text. A token makes several byte steps at once: `first` are the bytes that each of V tokens adds to an empty
    text, `later` to any other. The token that completes a stop string leads to state S, which has no row.
    """
    moves, complete = _byte_moves([stop.encode() for stop in stops])
    ended = len(complete)
    moves = np.vstack([np.where(complete[moves], ended, moves), np.full(256, ended)])  # `ended` is absorbing
    begun, going = _token_moves(moves, np.zeros(1, int), first), _token_moves(moves, np.arange(ended), later)
    begun[:, [not piece for piece in first]] = START - 1  # the text is still empty
    return np.concatenate([begun, going]).astype(np.int32) + 1  # START's row precedes those of the byte states


def _byte_moves(stops: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the automaton over bytes: next state int [S, 256], and bool [S], true if a stop string has just ended."""
    children: list[dict[int, int]] = [{}]
    complete = [False]
    for stop in stops:
        state = 0
        for byte in stop:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                complete.append(False)
            state = children[state][byte]
        complete[state] = True
    moves, shorter = np.zeros((len(children), 256), int), [0] * len(children)
    waiting = [0]
    for state in waiting:  # breadth first: states of shorter suffixes are complete before their use
        if state:
            moves[state] = moves[shorter[state]]
        for byte, child in children[state].items():
            shorter[child] = moves[shorter[state], byte] if state else 0
            complete[child] |= complete[shorter[child]]
            moves[state, byte] = child
            waiting.append(child)
    return moves, np.array(complete)


def _token_moves(moves: np.ndarray, states: np.ndarray, pieces: Sequence[bytes]) -> np.ndarray:
    """Return the next state for each state and token: int [states, V]."""
    flat, reached = moves.T.ravel(), np.repeat(states[None], len(pieces), axis=0)
    lengths = np.array([len(piece) for piece in pieces])
    for place in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > place)
        step = np.array([pieces[token][place] for token in longer.tolist()])
        reached[longer] = flat[len(moves) * step[:, None] + reached[longer]]
    return reached.T


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte token of SentencePiece
_CHECKS = 16  # random token sequences whose decoding is checked
_CHECKED = 24  # tokens of each


class Pieces(NamedTuple):
    """Bytes by token id, V of each; special tokens and ids without a token add nothing.

    `first` are those of a token that begins a text, `later` those of any other token.
    """

    first: list[bytes]
    later: list[bytes]


def token_pieces(tokenizer: Tokenizer, vocab_size: int) -> Pieces | None:
    """Return the bytes that tokens add to decoded text (skip_special_tokens, no clean-up of spaces).

    Tokens of a byte-level tokenizer, and SentencePiece's bytes, may hold parts of a character: hence bytes. V is the
    model's, which may exceed the tokenizer's. None if the tokenizer's text is not the concatenation of its tokens.
    """
    special = special_ids(tokenizer)
    size = min(len(tokenizer), vocab_size)
    names = tokenizer.convert_ids_to_tokens(list(range(size)))
    ordinary = [token for token in range(size) if token not in special and names[token] is not None]
    byte_level = "ByteLevel" in str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
    pieces = Pieces([b""] * vocab_size, [b""] * vocab_size)
    if byte_level:
        of_character = _byte_alphabet()
        for token in ordinary:
            name = names[token]
            spelled = all(character in of_character for character in name)
            piece = bytes(map(of_character.__getitem__, name)) if spelled else name.encode()
            pieces.first[token] = pieces.later[token] = piece
    else:
        _read_pieces(tokenizer, ordinary, names, pieces)
    # Decoders differ for bytes that are not valid UTF-8 together.
    whole = ordinary if byte_level else [token for token in ordinary if not _BYTE.fullmatch(names[token])]
    return pieces if whole and _holds(tokenizer, whole, pieces) else None


def _read_pieces(tokenizer: Tokenizer, ordinary: Sequence[int], names: Sequence[str], pieces: Pieces) -> None:
    anchor = next((token for token in ordinary if names[token].isascii() and names[token].isalpha()), ordinary[0])
    start = decoded(tokenizer, [anchor])
    for token in ordinary:
        if byte := _BYTE.fullmatch(names[token]):
            pieces.first[token] = pieces.later[token] = bytes([int(byte.group(1), 16)])
        else:
            pieces.first[token] = decoded(tokenizer, [token]).encode()
            pieces.later[token] = decoded(tokenizer, [anchor, token]).removeprefix(start).encode()


def _holds(tokenizer: Tokenizer, ordinary: Sequence[int], pieces: Pieces) -> bool:
    """Return whether random token sequences decode to the concatenation of their pieces."""
    random = np.random.default_rng(0)
    for _ in range(_CHECKS):
        tokens = random.choice(np.asarray(ordinary), _CHECKED).tolist()
        text = pieces.first[tokens[0]] + b"".join(pieces.later[token] for token in tokens[1:])
        if decoded(tokenizer, tokens) != text.decode(errors="replace"):
            return False
    return True


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
