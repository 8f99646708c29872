"""SFT matches sampling: the same allowed tokens, and the same ends of texts."""

import json
import re

import jax
import numpy as np
import pytest
import torch
from support.encoded_prompts import plain_rows
from support.taught_task import PROMPT, Taught
from support.tiny_models import causal_lm, chat_tokenizer

from grpo_jax.config.run import Config
from grpo_jax.config.sections import (
    DataSection,
    PolicySection,
    RewardSection,
    SamplingSection,
    SFTSection,
    TrainingSection,
)
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row
from grpo_jax.runs.loading import load
from grpo_jax.runs.sft import completion_pairs, run_sft
from grpo_jax.tasks.text_task import Text

TEXT, LONGEST = "red soap", 40


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder with two end tokens, of which the tokenizer's own, which ends its turns, comes second."""
    folder = causal_lm(tmp_path_factory.mktemp("warm") / "policy", num_hidden_layers=1)
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text())
    assert generation["eos_token_id"] == [258, 256]
    path.write_text(json.dumps(generation | {"eos_token_id": [256, 258]}))
    return folder


@pytest.fixture
def taught(policy):
    """Runs SFT of the given policy: its ctx, its variables, and the lines it said."""

    def teach(*texts):
        config = Config(
            task=Taught(texts=[*texts]),
            policy=PolicySection(path=str(policy), remat="none"),
            sft=SFTSection(steps=1, batch=1, learning_rate=0.01),
            data=DataSection(forbidden_tokens=chat_tokenizer()("é")["input_ids"]),
            sampling=SamplingSection(group_size=2, max_new_tokens=LONGEST, temperature=0.7),
            training=TrainingSection(prompts_per_batch=2, max_steps=1),
        )
        said, ctx = [], load(config, info=lambda *_: None)
        return ctx, run_sft(ctx, said.append), said

    return teach


def torch_loss(policy, ctx, ids) -> float:
    """The mean loss of these tokens behind the prompt, over the allowed tokens at the run's temperature."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype="float32")
    tokens, mask, _ = ctx.fns.encode(plain_rows([PROMPT]))
    prompt = tokens[0][mask[0]].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
    if ctx.allowed_tokens is not None:
        logits[:, ~torch.from_numpy(ctx.allowed_tokens)] = -torch.inf
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids)))


def said_loss(said) -> float:
    return float(re.search(r"loss (\S+)", said[-1])[1])


def test_the_loss_is_that_of_the_distribution_that_is_sampled(policy, taught):
    ctx, _, said = taught(TEXT)
    ids = ctx.policy.tokenizer(TEXT)["input_ids"]
    assert said_loss(said) == pytest.approx(torch_loss(policy, ctx, [*ids, 258]), abs=1e-3)


def test_a_mark_in_a_taught_text_is_text_and_its_end_is_added(policy, taught):
    """Texts are data: what they say can end no turn, and open none."""
    text = "red<|im_end|> soap"
    ctx, _, said = taught(text)
    tokenizer = ctx.policy.tokenizer
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text and not {256, 257, 258} & {*ids}
    assert said_loss(said) == pytest.approx(torch_loss(policy, ctx, [*ids, 258]), abs=1e-3)


def test_pairs_with_forbidden_tokens_are_counted_and_skipped(taught):
    _, variables, said = taught("été", TEXT, "x" * LONGEST + "é")
    assert said[0].startswith("SFT: 1 of 3 pairs are left out") and "data.forbidden_tokens" in said[0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(variables))


def test_rows_with_a_completion_are_the_pairs(policy, tmp_path):
    """A completion is a text or TRL's list of one assistant message; `sft.rows` takes the first rows that have one.

    A taught text ends with the token that ends a turn.
    """
    message = [{"role": "assistant", "content": "blue"}]
    rows = [("wool rug", None), (PROMPT, TEXT), ("oak desk", message), (PROMPT, "another text")]
    records = [{"prompt": prompt, "answer": answer, "split": "train"} for prompt, answer in rows]
    records += [{"prompt": "a", "split": "validation"}, {"prompt": "b", "split": "test"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = Config(
        task=Text(),
        policy=PolicySection(path=str(policy), remat="none"),
        sft=SFTSection(steps=80, rows=2, batch=2, learning_rate=0.01),
        data=DataSection(prompts=str(tmp_path / "pairs.jsonl"), columns={"completion": "answer"}),
        sampling=SamplingSection(group_size=2, max_new_tokens=12),
        training=TrainingSection(prompts_per_batch=2, max_steps=1),
        rewards=[RewardSection(name="support.taught_task:brevity")],
    )
    ctx = load(config, info=lambda *_: None)
    variables = run_sft(ctx, lambda line: None)
    tokens, mask, _ = ctx.fns.encode(plain_rows([PROMPT, "oak desk"]))
    samples = ctx.samplers.greedy(variables, tokens, mask, jax.random.split(jax.random.key(0), 2))
    written = zip(np.asarray(samples.tokens), np.asarray(samples.mask), strict=True)
    texts = [row[own].tolist() for row, own in written]
    assert texts == [[*ctx.policy.tokenizer(text)["input_ids"], 258] for text in (TEXT, "blue")]
    assert not samples.truncated.any()


CALLS = {"role": "assistant", "content": "I count.", "tool_calls": [{"function": {"name": "count"}}]}


@pytest.mark.parametrize("value", [["red"], [{"role": "user", "content": "red"}], {"content": "red"}, [CALLS]])
def test_a_completion_of_another_form_is_refused(value):
    with pytest.raises(UserError, match="completion of row 7: expected a text, or a list of one assistant message"):
        list(completion_pairs([Row(7, PROMPT, {"completion": value})]))


def test_too_few_pairs_are_refused(taught):
    with pytest.raises(UserError, match="expected at most 0, the number of SFT pairs, got 1"):
        taught("été")


def test_pairs_longer_than_a_completion_are_counted(taught):
    _, _, said = taught(TEXT, "x" * (LONGEST + 8))
    assert said[0].startswith("SFT: warning: 1 of 2 pairs are cut at sampling.max_new_tokens") and len(said) == 2


def test_pairs_with_end_tokens_or_second_thoughts_are_counted(taught, policy):
    """As data in another form has them: texts of whole turns, and thoughts after a prompt that ends them."""
    _, _, said = taught("red<|im_end|>", TEXT)
    assert said[0].startswith("SFT: warning: 1 of 2 pairs hold <|endoftext|> or <|im_end|> as text") and len(said) == 2
    template, thoughts = policy / "chat_template.jinja", "<think>Red?</think>soap"
    kept = template.read_text()
    for end, count in (("<think></think>", 1), ("<think>", 0)):
        template.write_text(kept + end)
        _, _, said = taught(thoughts, TEXT)
        warned = [line for line in said if line.startswith("SFT: warning: 1 of 2 pairs think after prompts that end")]
        assert len(warned) == count
    template.write_text(kept)
