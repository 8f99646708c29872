"""The unchanged prompt in its group: its rewards count, nothing is trained on it (a run: test_named_sampling)."""

import jax
import numpy as np
import pytest
from support.text_task import rewriting

from grpo_jax.config import make_config
from grpo_jax.errors import UserError
from grpo_jax.runs.iteration import batch_of, make_learner, sample_batch
from grpo_jax.runs.parts import load_parts

KEPT, GROUP = 2, 4


@pytest.fixture(scope="module")
def values(place):
    return rewriting(place)


def parts_of(values, **sections):
    config = make_config({**values, **sections})
    return load_parts(config, lambda *_: None)


def advantages_of(rewards, written):
    """GDPO of rewards [P, G, N] of weights 1 and 0.5; all have a vote, the first `written` of a group are trained."""
    apart = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    summed = apart @ np.array([1.0, 0.5])
    return ((summed - summed.mean()) / (summed.std(ddof=1) + 1e-4))[:, :written]


def test_the_update_is_that_of_groups_with_the_prompt_in_masked_rows(values, monkeypatch, tmp_path):
    """Against whole groups that were sampled, their last rows replaced by hand."""
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    kept = parts_of(values, sampling=values["sampling"] | {"keep_prompt": KEPT})
    episodes, judgement = sample_batch(kept, kept.policy.variables, 0)
    batch = batch_of(kept, episodes, judgement)
    whole = parts_of(values)
    sampled, sampled_judgement = sample_batch(whole, whole.policy.variables, 0)
    written = GROUP - KEPT
    texts, prompts = episodes.texts, [row.prompt for row in episodes.rows]
    assert [group[:written] for group in texts] == [group[:written] for group in sampled.texts]
    assert [group[written:] for group in texts] == [[prompt] * KEPT for prompt in prompts]

    wishes = [row.columns["wish"] for row in episodes.rows]
    letters = [
        [sum(c.isalpha() for c in text) / 8 + text.count(wish) for text in group]
        for group, wish in zip(texts, wishes, strict=True)
    ]
    rewards = np.stack([letters, [[-len(text) / 10 for text in group] for group in texts]], axis=-1)
    np.testing.assert_allclose(judgement.final_rewards, rewards, rtol=1e-6)
    np.testing.assert_allclose(batch.advantages[:, :written], advantages_of(rewards, written), atol=1e-5)
    alone = advantages_of(rewards[:, :written], written)
    assert np.abs(batch.advantages[:, :written] - alone).max() > 0.1  # the prompt's rewards matter

    start = jax.device_get(whole.policy.variables["params"])
    mask = np.array(sampled.samples.mask)
    mask[:, written:] = False
    by_hand = sampled._replace(samples=sampled.samples._replace(mask=mask))
    expected = batch_of(whole, by_hand, sampled_judgement)._replace(advantages=batch.advantages)
    learner = make_learner(kept)

    def updated(parts, batch):
        state, report = learner.update(learner.start(parts.policy.variables), batch, jax.random.key(0))
        return jax.device_get(state.variables["params"]), float(report["loss"])

    (came, loss), (wanted, wanted_loss) = updated(kept, batch), updated(whole, expected)
    assert loss == pytest.approx(wanted_loss, abs=1e-6)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), came, start)
    assert max(jax.tree.leaves(moved)) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), came, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "text"}, "0 with this task, in which an unchanged prompt is no answer, got 2"),
        ({"sampling": {"keep_prompt": 4, "group_size": 4}}, r"a number in \[0, group_size - 1 = 3\]"),
        ({"sampling": {"keep_prompt": 2, "turns": 2}}, "0 with sampling.turns above 1"),
        ({"algorithm": {"advantage": "gae"}}, "0 with advantage 'gae', which compares no groups"),
    ],
)
def test_where_it_means_nothing_it_is_refused(values, changes, message):
    values = {**values, "sampling": {"keep_prompt": 2}, **changes}
    with pytest.raises(UserError, match=f"sampling.keep_prompt: expected {message}"):
        make_config(values)
    shipped = make_config(task="prompt_enhancement", sampling={"keep_prompt": 2, "group_size": 8})
    assert shipped.sampling.written_completions == 6
