"""Dynamic sampling: drawn prompts and kept groups."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.rollouts import batch_of

from grpo_jax.config.run import make_config
from grpo_jax.rollout.data import Encoded, Row, batch_at, draw_at
from grpo_jax.rollout.encoding import ParsedCompletion
from grpo_jax.rollout.pipeline import Work
from grpo_jax.rollout.rollout import RolloutFns
from grpo_jax.runs.batches import collect_batch, weigh
from grpo_jax.sampling.decoding import Samples
from grpo_jax.training.estimators import informative_groups

SIZE, GROUP, STEPS, ROWS = 4, 3, 5, 14


@pytest.mark.parametrize("iteration", [0, 1, 7])
def test_a_draw_is_a_function_of_seed_iteration_and_number(iteration):
    draws = [draw_at(3, iteration, number, batch_size=4, n=14) for number in range(5)]
    np.testing.assert_array_equal(draws[0], batch_at(3, iteration, batch_size=4, n=14))
    again = draw_at(3, iteration, 2, batch_size=4, n=14)
    np.testing.assert_array_equal(draws[2], again)
    assert sorted(np.concatenate(draws)[:14]) == list(range(14))  # all prompts once before any comes again
    assert all(len(set(rows)) == 4 for rows in draws)
    assert not np.array_equal(draws[1], draw_at(4, iteration, 1, batch_size=4, n=14))


def make_ctx(teaches, **algorithm):
    """Parts whose judge gives two rewards that vary in the groups of the prompts `teaches` alone."""

    def sample(variables, tokens, mask, keys):
        numbers = np.asarray(jax.random.key_data(keys))[:, :1] % 1000  # what was drawn tells its key
        tokens = np.broadcast_to(numbers[..., None], (len(numbers), GROUP, STEPS)).astype(np.int32)
        lengths = np.broadcast_to(np.arange(1, GROUP + 1), tokens.shape[:2])
        mask = np.arange(STEPS) < lengths[..., None]
        zeros = np.zeros(tokens.shape, np.float32)
        return Samples(tokens, mask, zeros, zeros - 0.5, np.zeros(tokens.shape[:2], bool))

    def score(prompts, texts, pictures, **told):
        judged.append([row.id for row in prompts])
        spread = np.linspace(0, 1, GROUP) * np.array([row.id in teaches for row in prompts])[:, None]
        # the two objectives cancel in the sum, if the prompt's number is odd
        sign = np.array([-1 if row.id % 2 else 1 for row in prompts])[:, None]
        return np.stack([spread, sign * spread], -1).astype(np.float32), np.zeros((len(prompts), GROUP, 0), np.float32)

    judged: list[list[int]] = []
    fns = RolloutFns(
        encode=lambda rows: Encoded(np.ones((len(rows), 2), np.int32), np.ones((len(rows), 2), bool)),
        decode=lambda tokens, prompt: (text := f"{prompt}:{tokens[0]}", ParsedCompletion(text, True)),
        render=None,
        score=score,
        reward_names=("a", "b"),
        eval_reward_names=(),
    )
    values = {
        "task": "text",
        "training": {"prompts_per_batch": SIZE},
        "sampling": {"group_size": GROUP, "max_new_tokens": STEPS},
        "algorithm": {"zero_variance_groups": "resample", **algorithm},
    }
    prompts = SimpleNamespace(train=[Row(number, f"p{number}") for number in range(ROWS)])
    ctx = SimpleNamespace(
        config=make_config(values), fns=fns,
        key=jax.random.key(0),
        work=lambda chunk_prompts, *_: Work(chunk_prompts), iterations=8,
        samplers=SimpleNamespace(training=sample),
        rewards=SimpleNamespace(weights={"a": 1.0, "b": 1.0}, conditions=()),
        policy=SimpleNamespace(mesh=None), policy_device=jax.devices()[0],
        task_data=SimpleNamespace(
            prompts=prompts, report=SimpleNamespace(statistics=lambda *of: {}), invalid="prompt"
        ),
    )  # fmt: skip
    return ctx, judged


def drawn_of(ctx, iteration=0):
    """What an iteration draws: its rollout, its objectives, which groups are informative, and its row."""
    rollout, objectives, row = collect_batch(ctx, None, iteration)
    informative = informative_groups(objectives, ctx.config.algorithm)
    return SimpleNamespace(rollout=rollout, objectives=objectives, informative=informative, row=row)


def learned_from(ctx, rewards):
    """The batch of an iteration with rewards [P, G, N], or [G, N] in each group; which groups are informative."""
    drawn = drawn_of(ctx)
    rewards = np.broadcast_to(np.array(rewards, np.float32), (SIZE, GROUP, 2))
    rollout = drawn.rollout._replace(rewards=rewards[:, :, None])
    objectives = weigh(ctx, rollout)
    return batch_of(ctx, rollout, objectives), informative_groups(objectives, ctx.config.algorithm)


def ids(drawn):
    return [row.id for row in drawn.rollout.rows]


def order(iteration=0):
    return list(np.concatenate([draw_at(0, iteration, k, batch_size=SIZE, n=ROWS) for k in range(4)]))


@pytest.mark.parametrize("cap", [2.0, 0.0])
def test_an_informative_batch_is_not_drawn_again(cap):
    """The sampler's own probabilities travel only when asked for."""
    ctx, judged = make_ctx(range(ROWS), importance_cap=cap)
    drawn = drawn_of(ctx, 2)
    assert ids(drawn) == list(batch_at(0, 2, batch_size=SIZE, n=ROWS))
    assert drawn.row["draws"] == 1 and len(judged) == 1
    assert (batch_of(ctx, drawn.rollout, drawn.objectives).sampler_logprobs is not None) == bool(cap)


def test_further_prompts_take_the_places_of_dead_groups():
    own, further = order()[:SIZE], order()[SIZE : 2 * SIZE]
    teaches = {own[1], *further[1:]}
    ctx, judged = make_ctx(teaches)
    drawn = drawn_of(ctx)
    assert drawn.row["draws"] == 2 and judged == [own, further]
    assert ids(drawn) == [own[1], *further[1:]]
    assert drawn.row["reward/a/mean"] == pytest.approx(0.5 / SIZE)  # of the first draw
    assert drawn.rollout.episodes[1][0].last.raw_completion.startswith(
        f"p{further[1]}:"
    )  # texts went along with their rows
    batch = batch_of(ctx, drawn.rollout, drawn.objectives)
    assert drawn.informative.all() and batch.mask.any(-1).all()
    np.testing.assert_array_equal(drawn.objectives.rewards, drawn.rollout.final_rewards)


def test_too_few_groups_are_filled_up_with_masked_ones():
    own, further = order()[:SIZE], order()[SIZE:]
    ctx, judged = make_ctx({own[2], further[0]})
    drawn = drawn_of(ctx)
    assert drawn.row["draws"] == 4 and len(judged) == 4  # the bound
    assert ids(drawn) == [own[2], further[0], own[0], own[1]]
    batch = batch_of(ctx, drawn.rollout, drawn.objectives)
    assert drawn.informative.tolist() == [True, True, False, False] and drawn.row["groups_kept"] == 2
    np.testing.assert_array_equal(batch.mask.any((1, 2)), [True, True, False, False])
    assert not np.asarray(batch.advantages)[2:].any() and np.asarray(batch.advantages)[:2].any()


def test_informative_groups_differ_between_sum_and_objectives():
    """Odd prompts' objectives cancel: GDPO learns from them, GRPO has to look on."""
    for advantage in ("gdpo", "grpo"):
        ctx, _ = make_ctx(range(ROWS), advantage=advantage)
        own = order(1)[:SIZE]
        assert any(number % 2 for number in own)
        drawn = drawn_of(ctx, 1)
        assert (drawn.row["draws"] > 1) == (advantage == "grpo")
        if advantage == "grpo":
            kept = drawn.informative.sum()
            assert all(number % 2 == 0 for number in ids(drawn)[:kept])


def test_a_prompt_that_comes_again_gets_other_completions():
    ctx, judged = make_ctx(())
    ctx.task_data.prompts.train = ctx.task_data.prompts.train[:SIZE]
    keys = []
    sample = ctx.samplers.training
    ctx.samplers.training = lambda *given: (keys.append(jax.random.key_data(given[-1])), sample(*given))[1]
    drawn_of(ctx)
    assert len(judged) == 4 and all(sorted(numbers) == sorted(judged[0]) for numbers in judged)
    assert not (keys[0] == keys[1]).all(-1).any()


def test_dropped_groups_change_no_statistic():
    own = order()[:SIZE]
    ctx, judged = make_ctx(set(own[:2]), zero_variance_groups="drop")
    drawn = drawn_of(ctx)
    assert drawn.row["draws"] == 1 and len(judged) == 1
    batch = batch_of(ctx, drawn.rollout, drawn.objectives)
    assert drawn.informative.sum() == 2 and not batch.mask[2:].any() and batch.mask[:2].any((1, 2)).all()
    # whitening sees the two groups alone: their deviation is 1, which the zeros of the others would lower
    alive = np.asarray(batch.advantages)[:2]
    assert alive.std(ddof=1) == pytest.approx(1, abs=1e-3)
    ctx, _ = make_ctx(set(own[:2]), zero_variance_groups="keep")
    drawn = drawn_of(ctx)
    kept_zeros = batch_of(ctx, drawn.rollout, drawn.objectives)
    assert drawn.informative.sum() == 2 and kept_zeros.mask.any((1, 2)).all()
    np.testing.assert_array_equal(np.asarray(kept_zeros.advantages)[2:], 0)
    assert np.asarray(kept_zeros.advantages).std(ddof=1) == pytest.approx(1, abs=1e-3)


def test_a_completion_without_a_reward_takes_no_part_in_ppo():
    ctx, _ = make_ctx(range(ROWS), zero_variance_groups="keep", advantage="gae")
    rewards = drawn_of(ctx).rollout.final_rewards.copy()
    rewards[1, 2] = np.nan  # all of it is missing
    rewards[2, 0, 1] = np.nan  # one of two
    batch, _ = learned_from(ctx, rewards)
    rows_with_tokens = np.asarray(batch.mask.any(-1))
    assert not rows_with_tokens[1, 2] and rows_with_tokens.sum() == SIZE * GROUP - 1
    assert batch.advantages is None and np.isnan(batch.scores[1, 2])
    a, b = rewards[2].T
    assert float(batch.scores[2, 0]) == a[0] + b[1:].mean()


@pytest.mark.parametrize("advantage", ["grpo", "gae"])  # the others begin with the same sum
def test_a_missing_reward_is_the_mean_of_its_group_where_objectives_are_summed(advantage):
    """Of (1, 1), (1, missing), (0, 1) the second is as good as the first: that a judge failed is no punishment."""
    ctx, _ = make_ctx(range(ROWS), zero_variance_groups="keep", advantage=advantage)

    def learned(rewards):
        batch, _ = learned_from(ctx, rewards)
        return np.asarray(batch.scores if advantage == "gae" else batch.advantages)

    whole = np.array([[1, 1], [1, 1], [0, 1]], np.float32)
    some = whole.copy()
    some[1, 1] = np.nan
    np.testing.assert_array_equal(learned(some), learned(whole))
    # neither all of an objective that failed for the group, nor a mean that is not exact, makes a difference
    gone = whole.copy()
    gone[:, 1] = np.nan
    np.testing.assert_array_equal(learned(gone), learned(whole * [1, 0]))
    tenths = np.array([[1, 0.1], [1, np.nan], [1, 0.1]], np.float32)
    assert len(np.unique(learned(tenths))) == 1
    # without any reward a completion stays without
    gone[1] = np.nan
    assert (np.isnan if advantage == "gae" else np.logical_not)(learned(gone)[:, 1]).all()


def test_a_missing_reward_makes_no_group_informative():
    ctx, _ = make_ctx(range(ROWS), zero_variance_groups="drop", advantage="grpo")
    batch, informative = learned_from(ctx, [[1, 0.1], [1, np.nan], [1, 0.1]])
    assert not informative.any() and not batch.mask.any()
