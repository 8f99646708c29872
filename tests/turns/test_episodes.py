"""Episodes of a tiny policy from sampler to gradient: one stream, with the numbers of long prompts."""

import functools
import pickle
from threading import Lock
from types import MappingProxyType

import jax
import numpy as np
import pytest
from support.tiny_decoders import tiny

from grpo_jax.config.sections import AlgorithmSection
from grpo_jax.core.aggregation import loss_normaliser
from grpo_jax.errors import StageError
from grpo_jax.rollout.data import Encoded, Row
from grpo_jax.rollout.encoding import ParsedCompletion
from grpo_jax.rollout.env import EnvError, EnvSettings, Episode, Observation, Turn, collect_observations
from grpo_jax.rollout.pipeline import Work
from grpo_jax.rollout.rewards import Score
from grpo_jax.rollout.rollout import RolloutFns, collect
from grpo_jax.sampling.episodes import make_episode_sampler
from grpo_jax.sampling.samplers import stop_table
from grpo_jax.sampling.token_choice import SamplingParams
from grpo_jax.training.batch import Batch, make_batch
from grpo_jax.training.estimators import informative_groups, make_turn_objectives
from grpo_jax.training.objectives import loss_options, make_forward, make_policy_objective

EOS, PAD, GROUP, STEPS, ANSWER, TURNS = 3, 0, 4, 7, 6, 3
STREAM = TURNS * STEPS + (TURNS - 1) * ANSWER
ENDS = (EOS, *range(58, 64))
ALLOWED = np.array([not 20 <= token < 48 for token in range(64)])  # all but what the environment says
PROMPTS = {"a": [9, 10, 11], "b": [12, 13], "c": [14, 15, 16, 17, 18], "d": [19, 9]}
ROWS = [Row(number, prompt) for number, prompt in enumerate(PROMPTS)]
KEY = jax.random.key(5)


def encode(rows):
    tokens = np.array([[PAD] * (5 - len(PROMPTS[row.prompt])) + PROMPTS[row.prompt] for row in rows], np.int32)
    return Encoded(tokens, tokens != PAD)


def words(text):
    return [int(word) for word in text.split()]


def say(answer, ended, grids):
    """The answer's numbers as tokens; what was cut off gets its end first."""
    return [*([] if ended else [EOS]), *words(answer.text)]


def told(rows, episodes):
    """As many tokens as the text's first number says, of which the last is how many turns there were; ends at a 4."""
    answers = []
    for row, episode in zip(rows, episodes, strict=True):
        first = words(episode.last.completion)[0]
        numbers = [*range(20, 20 + first % ANSWER), 40 + len(episode.turns) + row.id]
        answers.append(None if first % 4 == 0 else Observation(" ".join(map(str, numbers[-(ANSWER - 1) :]))))
    return answers


def length(completions):
    return [len(text.split()) / STEPS for text in completions]


def high(completions, episodes, completion_ids):
    """Of the turn's first token, more of later turns."""
    assert completion_ids == [words(text) for text in completions]  # the turn's own tokens
    return [words(text)[0] / 60 + len(episode.turns) for text, episode in zip(completions, episodes, strict=True)]


def make_environment(step=told, *, lenient=False, rewards=None, turns=TURNS, say=say, **more):
    score = Score(rewards or {"length": length, "high": high}, {}, missing=lenient)
    return RolloutFns(
        encode=encode,
        decode=lambda tokens, prompt: (text := " ".join(map(str, tokens)), ParsedCompletion(text, True)),
        render=None,
        score=score,
        reward_names=tuple(rewards or ("length", "high")),
        eval_reward_names=(),
        env=EnvSettings(turns, step, say, STREAM, PAD, lenient, ENDS, **more),
    )


def sampler(architecture="llama", restrictions=MappingProxyType({}), **more):
    params = SamplingParams(GROUP, STEPS, 1.0, **restrictions)
    given = {"eos_ids": ENDS, "pad_id": PAD, "allowed_tokens": ALLOWED, **more}
    return make_episode_sampler(tiny(architecture).policy, params, **given)


@functools.cache
def usual(architecture):
    return sampler(architecture)


def play(environment=None, *, sample=None, iteration=0, architecture="llama"):
    environment, sample = environment or make_environment(), sample or usual(architecture)
    options = {"key": KEY, "iteration": iteration, "work": Work(chunk_prompts=2)}
    return collect(environment, sample, tiny(architecture).variables, ROWS, **options)


@pytest.fixture(scope="module")
def rollout():
    return play()


@pytest.fixture(scope="module")
def restricted():
    """Two turns with stop strings, of tokens that are drawn among the likeliest."""
    pieces = [f" {token}".encode() for token in range(64)]
    restrictions = {"top_k": 4, "top_p": 0.9, "keep_mask": True}
    sample = sampler(restrictions=restrictions, stops=stop_table([" 1", " 2"], pieces, pieces))
    return play(make_environment(turns=2), sample=sample)


def batch_of(rollout, section):
    """The rollout as an update takes it, and its objectives."""
    objectives = make_turn_objectives(
        rollout.rewards,
        rollout.lengths,
        section,
        weights={"length": 1.0, "high": 0.5},
        max_new_tokens=STEPS,
    )
    return make_batch(rollout, objectives, section), objectives


def turns_apart(rollout):
    """Each turn of each completion: (p, g, turn, what stands before it, what the policy wrote), without padding."""
    samples, found = rollout.samples, []
    for p, g in np.ndindex(len(ROWS), GROUP):
        row = samples.tokens[p, g][samples.present[p, g]]
        mask, turn = (array[p, g][samples.present[p, g]] for array in (samples.mask, samples.turn))
        for number in range(turn[mask].max() + 1):
            own = np.flatnonzero(mask & (turn == number))
            assert (np.diff(own) == 1).all()
            found.append((p, g, number, [*PROMPTS[ROWS[p].prompt], *row[: own[0]]], row[own]))
    return found


def test_a_stream_is_the_episode_without_holes(rollout):
    """Each turn's text, and the answer's tokens behind it, read back from the tokens."""
    samples = rollout.samples
    assert samples.tokens.shape == (4, GROUP, STREAM) and samples.truncated.any() and not samples.truncated.all()
    counts = set()
    for p, g in np.ndindex(4, GROUP):
        episode, expected, wrote = rollout.episodes[p][g], [], []
        for number, turn in enumerate(episode.turns):
            expected += words(turn.raw_completion)
            wrote += [True] * (len(expected) - len(wrote))
            if number + 1 < len(episode.turns):
                expected += say(turn.observation, not turn.truncated, ())
                wrote += [False] * (len(expected) - len(wrote))
            assert turn.truncated == (words(turn.raw_completion)[-1] not in ENDS)
        present = samples.present[p, g]
        assert present.tolist() == [True] * len(expected) + [False] * (STREAM - len(expected))
        assert samples.tokens[p, g][present].tolist() == expected and (samples.tokens[p, g][~present] == PAD).all()
        assert samples.mask[p, g][present].tolist() == wrote
        assert samples.truncated[p, g] == any(turn.truncated for turn in episode.turns)
        assert (samples.logprobs[p, g] != 0).tolist() == samples.mask[p, g].tolist()
        assert rollout.texts[p][g] == episode.last.completion
        counts.add(len(episode.turns))
        assert episode.last.observation is None if len(episode.turns) == TURNS else episode.last.observation.done
    assert counts == {1, 2, 3}


def test_a_turn_that_a_stop_string_ended_is_given_its_end_mark(restricted):
    """It was not written, and the chat template has it; the turn is none that was cut off all the same."""
    stopped = 0
    for p, g in np.ndindex(4, GROUP):
        episode, expected = restricted.episodes[p][g], []
        for turn in episode.turns:
            written = words(turn.raw_completion)
            ended = written[-1] in ENDS
            assert turn.truncated == (len(written) == STEPS and not ended and str(written[-1])[0] not in "12")
            assert not any(str(token)[0] in "12" for token in written[:-1])
            expected += written
            if turn is not episode.last:
                expected += say(turn.observation, ended, ())
                stopped += not ended and not turn.truncated
        assert restricted.samples.tokens[p, g][restricted.samples.present[p, g]].tolist() == expected
    assert stopped > 3


@pytest.mark.parametrize(
    "architecture", ["llama", pytest.param("gpt2", marks=pytest.mark.wide)]
)  # rotations, learned positions
def test_the_updates_logprobs_are_the_samplers(architecture, rollout):
    """Of every turn, and those of the same text as one long prompt and completion."""
    model = tiny(architecture)
    rollout = rollout if architecture == "llama" else play(architecture=architecture)
    batch, _ = batch_of(rollout, AlgorithmSection())
    assert batch.packing is not None
    forward = jax.jit(make_forward(model.policy, temperature=1.0, allowed_tokens=ALLOWED))
    came = np.asarray(forward(model.variables, batch).logprobs)
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(came[mask], np.asarray(batch.rollout_logprobs)[mask], atol=2e-5)
    apart = long_prompts(turns_apart(rollout))
    alone = np.asarray(forward(model.variables, apart).logprobs)
    for number, (p, g, turn, _, own) in enumerate(turns_apart(rollout)):
        places = mask[p, g] & (np.asarray(batch.turn)[p, g] == turn)
        np.testing.assert_allclose(came[p, g][places], alone[number, 0, : len(own)], atol=2e-5)


def test_kept_tokens_of_every_turn_restrict_the_update(restricted):
    """With a sampling mask, the update's log-probabilities are the restricted sampler's in each turn."""
    model, samples = tiny("llama"), restricted.samples
    assert samples.kept.shape == (4, GROUP, STREAM, 4) and samples.turn[samples.mask].max() > 0
    assert (samples.kept[~samples.mask] == -1).all()
    batch, _ = batch_of(restricted, AlgorithmSection())
    forward = jax.jit(make_forward(model.policy, temperature=1.0, allowed_tokens=ALLOWED))
    came, mask = np.asarray(forward(model.variables, batch).logprobs), np.asarray(batch.mask)
    np.testing.assert_allclose(came[mask], samples.sampler_logprobs[samples.mask], atol=2e-5)
    assert np.abs(samples.sampler_logprobs - samples.logprobs)[samples.mask].max() > 0.1


def long_prompts(turns):
    """Turns as prompts of their own with one completion each."""
    widest, longest = max(len(before) for *_, before, _ in turns), max(len(own) for *_, own in turns)
    prompts, tokens = np.zeros((len(turns), widest), np.int32), np.zeros((len(turns), 1, longest), np.int32)
    prompt_mask, mask = np.zeros(prompts.shape, bool), np.zeros(tokens.shape, bool)
    for row, (*_, before, own) in enumerate(turns):
        prompts[row, widest - len(before) :], prompt_mask[row, widest - len(before) :] = before, True
        tokens[row, 0, : len(own)], mask[row, 0, : len(own)] = own, True
    return Batch(prompts, prompt_mask, tokens, mask)


def test_gradients_are_those_of_long_prompts(rollout):
    """What was said is read and never trained; each token is weighed by its turn's advantage."""
    model = tiny("llama")
    assert batch_of(rollout, AlgorithmSection(advantage="grpo", turn_advantage="last"))[0].advantages.shape == (
        4,
        GROUP,
    )
    section = AlgorithmSection(advantage="grpo", preset="bnpo", turn_advantage="return", turn_gamma=0.5)
    batch, _ = batch_of(rollout, section)
    turns = turns_apart(rollout)
    advantages = np.asarray(batch.advantages)
    mask, number = jax.device_get((batch.mask, batch.turn))
    places = [(mask & (number == turn))[p, g] for p, g, turn, *_ in turns]
    values = [set(advantages[p, g][place].tolist()) for (p, g, *_), place in zip(turns, places, strict=True)]
    assert all(len(one) == 1 for one in values) and len(set().union(*values)) > 12  # turns of one completion differ
    weights = np.float32([one.pop() for one in values])[:, None]
    forward = make_forward(model.policy, temperature=1.0, allowed_tokens=ALLOWED)
    objective = make_policy_objective(forward, loss_options(section, max_new_tokens=STREAM))

    def gradient(batch):
        whole = loss_normaliser(batch.mask, "token")
        gradients = jax.grad(lambda variables: objective(variables, batch, whole)[0])
        return jax.jit(gradients)({"params": model.variables["params"]})

    came, expected = gradient(batch), gradient(long_prompts(turns)._replace(advantages=weights))
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 0.01
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), came, expected)


def test_an_episode_follows_from_seed_and_iteration(rollout):
    again, other = play(), play(iteration=1)
    jax.tree.map(np.testing.assert_array_equal, again.samples, rollout.samples)
    assert again.episodes == rollout.episodes and other.episodes != rollout.episodes


def raising(rows, episodes):
    raise KeyError("the tool is away")


BAD = {
    "raises": (raising, "the environment: it raised KeyError: 'the tool is away'"),
    "too few": (lambda rows, episodes: ["5"], "it must return a list .*, one value for each of 8 completions, got 1"),
    "a number": (
        lambda rows, episodes: [7] * len(rows),
        r"it answered 7, not an Observation .*, a text or None to completion 0",
    ),
    "a picture": (
        lambda rows, episodes: [Observation("5", (np.zeros((4, 4, 3)),))] * len(rows),
        "it answered with a picture, and no vision tower is loaded",
    ),
    "too long": (lambda rows, episodes: ["long"] * len(rows), "the environment: its observation 'long' takes too many"),
}


def limited(answer, ended, grids):
    if answer.text == "long":
        raise EnvError("its observation 'long' takes too many")
    return say(answer, ended, grids)


@pytest.mark.parametrize("kind", BAD)
def test_an_environment_that_fails_stops_the_run_by_name_or_leaves_no_reward(kind):
    step, message = BAD[kind]
    with pytest.raises(StageError, match=message) as error:
        play(make_environment(step, say=limited))
    assert error.value.stage == "env"
    came = play(make_environment(step, lenient=True, say=limited))
    assert np.isnan(came.rewards).all()
    assert all(len(episode.turns) == 1 for group in came.episodes for episode in group)
    batch, _ = batch_of(came, AlgorithmSection())
    assert (np.asarray(batch.advantages) == 0).all()


def test_a_failed_observation_costs_its_own_completion_alone():
    def some(rows, episodes):
        answers = ["21 22"] * len(rows)
        return [
            3.5 if row.id == 1 and place % GROUP == 2 else one
            for place, (row, one) in enumerate(zip(rows, answers, strict=True))
        ]

    rollout = play(make_environment(some, lenient=True, turns=2))
    missing = np.isnan(rollout.final_rewards).all(-1)
    assert missing.sum() == 1 and missing[1, 2] and np.isnan(rollout.rewards[1, 2]).all()


def test_only_continuing_episodes_are_stepped_and_judged():
    """And what it is asked with is the episode so far, its rewards among it."""
    asked, scored = [], []

    def step(rows, episodes):
        asked.append((len(rows), {len(episode.turns) for episode in episodes}))
        assert all(set(episode.last.rewards) == {"count"} for episode in episodes)
        return [None if row.id == 2 else "21" for row in rows]

    def count(prompts, completions, episodes):
        scored.append((len(completions), prompts.count("c")))
        return [float(len(episode.turns)) for episode in episodes]

    rollout = play(make_environment(step, rewards={"count": count}))
    assert sorted(asked, key=str) == [(4, {2}), (8, {1}), (8, {1}), (8, {2})]
    assert sorted(scored) == [(4, 0), (4, 0), (8, 0), (8, 0), (8, 0), (8, 4)]
    np.testing.assert_array_equal(rollout.rewards[[0, 1, 3], ..., 0], np.broadcast_to([1, 2, 3], (3, GROUP, 3)))
    assert (rollout.rewards[2, :, 0] == 1).all() and np.isnan(rollout.rewards[2, :, 1:]).all()


def test_an_environment_changes_its_own_copies_alone():
    """Its rows, the rewards it reads, and the array that it draws into."""
    canvas = np.zeros((2, 2, 3), np.uint8)

    def step(rows, episodes):
        for row, episode in zip(rows, episodes, strict=True):
            assert row.columns["left"].pop() == 2 and row.columns.pop("name")
            assert [turn.rewards["count"] for turn in episode.turns] == [1] * len(episode.turns)
            episode.last.rewards["count"] = 5.0
        return [Observation("21", (canvas,))] * len(rows)

    rows = [Row(1, "a", {"left": [1, 2], "name": "x"})] * 2
    episodes = [Episode((Turn("b", rewards={"count": 1.0}),))] * 2
    for _ in range(2):
        shown, _ = collect_observations(step, rows, episodes)
    canvas += 1
    assert shown.pictures[0].max() == 0


def test_an_episode_is_pickled_without_its_memory():
    """As for a reward in another process: whatever the mapping of its rewards, and the objects in its memory."""
    episode = Episode((Turn("b", rewards=MappingProxyType({"count": 1.0})),), final=True, memory={"lock": Lock()})
    came = pickle.loads(pickle.dumps(episode))
    assert came == episode and came.last.rewards == {"count": 1.0} and came.memory == {}


def test_a_run_of_episodes_that_all_end_is_over():
    calls = []
    rollout = play(make_environment(lambda rows, episodes: calls.append(1) or [None] * len(rows)))
    assert calls == [1, 1] and (rollout.samples.turn == 0).all()
    assert not np.isnan(rollout.final_rewards).any()
    np.testing.assert_array_equal(rollout.samples.present, rollout.samples.mask)


def test_informative_groups_differ_in_some_turn():
    """A group whose episodes return alike in all teaches something where a turn differs."""
    rewards = np.array([[[[0.0], [1.0]], [[1.0], [0.0]]]], np.float32)
    section = AlgorithmSection(advantage="grpo", turn_advantage="return")
    lengths = np.ones((1, 2, 2), np.int32)
    options = {"weights": {"a": 1.0}, "max_new_tokens": 4}
    returned = make_turn_objectives(rewards, lengths, section, **options)
    assert (np.asarray(returned.rewards) == 1).all() and informative_groups(returned, section).all()
    last = section.replace(turn_advantage="last")
    ended = make_turn_objectives(rewards, lengths, last, **options)
    np.testing.assert_array_equal(ended.rewards[0, :, 0], [1, 0])
