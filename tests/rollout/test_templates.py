"""Inputs of a chat template beside the messages: tools and options, which must reach it or are refused."""

import datetime
import json
from types import SimpleNamespace

import pytest
import yaml
from support.encoded_prompts import plain_rows
from support.text_task import SHORT, train_here
from support.tiny_models import causal_lm, chat_tokenizer

from grpo_jax.config.fields import to_yaml
from grpo_jax.config.run import make_config
from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.encoding import make_encode
from grpo_jax.rollout.env import Observation, make_encode_observation
from grpo_jax.rollout.tools import unread_call
from grpo_jax.runs.loading import with_template_date

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ mood | default('') }}{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
SIT = {"type": "function", "function": {"name": "sit"}}


def templated():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def expected(tokenizer, prompt, **told):
    talk = [{"role": "user", "content": prompt}]
    templated = tokenizer.apply_chat_template(talk, add_generation_prompt=True, **told)
    return templated if isinstance(templated, str) else templated["input_ids"]


def test_tools_and_options_of_the_config_are_as_transformers_has_them():
    tokenizer = templated()
    section = DataSection(tools=[ADD, SIT], chat_template_options={"mood": "merry"})
    encoded = make_encode(tokenizer, section, pad_id=0, rows=plain_rows(["a fox"] * 2))(plain_rows(["a fox"]))
    found = encoded.tokens[encoded.mask].tolist()
    assert found == expected(tokenizer, "a fox", tools=[ADD, SIT], mood="merry") != expected(tokenizer, "a fox")


def test_an_option_that_a_template_ignores_is_refused():
    tokenizer = chat_tokenizer()  # whose template knows nothing but messages
    for section, name in (
        (DataSection(tools=[ADD]), "data.tools"),
        (DataSection(chat_template_options={"mood": 1}), "data.chat_template_options.mood"),
    ):
        with pytest.raises(UserError, match=f"chat template does not support .*; remove {name} or use another policy$"):
            make_encode(tokenizer, section, pad_id=0)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"template does not support tools; remove data\.tools or use another policy$"):
        make_encode(tokenizer, DataSection(tools=[ADD]), pad_id=0)


def test_a_template_whose_calls_are_not_read_is_named():
    """Qwen's and Llama's forms are read, Mistral's is not."""
    tokenizer = chat_tokenizer()
    before = "{% for message in messages %}{{ message['role'] }}\n{{ message['content'] }}"
    call = '{{ c.name }}", "%s": {{ c.arguments | tojson }}'
    for form, word, read in (
        ('<tool_call>\n{"name": "@}\n</tool_call>', "arguments", True),
        ('{"name": "@}<|im_end|>', "parameters", True),
        ('[TOOL_CALLS] [{"name": "@}]', "arguments", False),
        ("", "", True),  # it writes no calls
    ):
        written = "{% set c = message.tool_calls[0].function %}" + form.replace("@", call % word) if form else ""
        tokenizer.chat_template = f"{before}{{% if message.tool_calls %}}{written}{{% endif %}}{{% endfor %}}"
        found = unread_call(tokenizer, {"tools": [ADD]})
        assert not found if read else found.startswith('[TOOL_CALLS] [{"name": "look_up"')


def test_a_template_that_leaves_out_a_message_or_the_tools_is_refused():
    """As Phi-3's first template does with system messages, and Phi-4-mini's with tools outside of one."""
    tokenizer, rows = templated(), plain_rows(["a fox"])
    tokenizer.chat_template = TEMPLATE.replace("messages %}", "messages if message['role'] != 'system' %}")
    make_encode(tokenizer, DataSection(), pad_id=0, rows=rows)
    with pytest.raises(UserError, match="leaves out a message of the role system: fix it, or drop the message"):
        make_encode(tokenizer, DataSection(system_prompt="Be brief."), pad_id=0, rows=rows)
    tokenizer.chat_template = TEMPLATE.replace("{% if tools %}", "{% if messages[0].tools and tools %}")
    with pytest.raises(UserError, match=r"does not support tools; remove data\.tools or use another policy$"):
        make_encode(tokenizer, DataSection(tools=[ADD]), pad_id=0)


def test_observations_use_the_same_template_options():
    tokenizer = templated()
    named = {"eos_ids": [tokenizer.eos_token_id], "vocab_size": len(tokenizer), "limit": 99, "mood": "merry"}
    assert tokenizer.decode(make_encode_observation(tokenizer, **named)(Observation("no"), True)).endswith(
        "assistant\nmerry"
    )


def test_the_command_encodes_prompts_with_tools_and_refuses_unsupported_options(place, tmp_path, capsys):
    folder = causal_lm(tmp_path / "policy")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    lines = [{"prompt": f"{c} tree", "wish": c} for c in "abcdefghijklmnop"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {"policy.path": folder, "data.prompts": tmp_path / "p.jsonl", "data.tools": json.dumps([ADD])}
    words = [f"--{name}={value}" for name, value in values.items()]
    count = len(expected(templated(), "a tree", tools=[ADD], mood="merry"))
    for option, message in (
        (f"max_prompt_tokens={count - 1}", f"takes {count} tokens with its instruction"),
        (
            "chat_template_options.tone=low",
            "the policy's chat template does not support tone; remove data.chat_template_options.tone",
        ),
    ):
        mood = "--data.chat_template_options.mood=merry"
        assert train_here(place.config, tmp_path / "run", *words, mood, f"--data.{option}") == 2
        assert message in capsys.readouterr().err


def test_a_resumed_run_keeps_the_date_of_its_start(tmp_path):
    """Also where --config names the user's own file, which has no date."""
    config = make_config(task="text", run_dir=str(tmp_path))
    dated = config.replace(data=config.data.replace(chat_template_options={"today": "2026-01-02"}))
    (tmp_path / "config.yaml").write_text(to_yaml(dated))
    tokenizer = SimpleNamespace(chat_template="{{ strftime_now('%d %b %Y') }}")
    assert with_template_date(config.replace(resume=True), tokenizer) == dated.replace(resume=True)
    began = with_template_date(config, tokenizer).data.chat_template_options
    assert began == {"today": datetime.date.today().isoformat()}


@pytest.mark.wide
def test_a_template_that_writes_the_date_writes_that_of_the_runs_start(place, tmp_path, monkeypatch):
    """The clock that transformers and the run read is set to another day for the evaluation."""
    import transformers.utils.chat_template_utils as clock

    from grpo_jax import evaluate
    from grpo_jax.runs import loading

    days = [datetime.datetime(2026, 1, 2)]

    class Now(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return days[-1]

    today = SimpleNamespace(date=SimpleNamespace(today=lambda: days[-1].date()))
    monkeypatch.setattr(clock, "datetime", Now)
    monkeypatch.setattr(loading, "datetime", today)
    folder = causal_lm(tmp_path / "policy", num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}\n" + TEMPLATE)
    values = {"policy.path": folder, "training.max_steps": 1, "evaluation.every": 0, "data.max_prompt_tokens": 100}
    whole = tmp_path / "whole"
    monkeypatch.setenv("JUDGE_RUN", str(whole))  # for the evaluation
    assert train_here(place.config, whole, *(f"--{name}={value}" for name, value in values.items()), *SHORT) == 0
    assert yaml.safe_load((whole / "config.yaml").read_text())["data"]["chat_template_options"] == {
        "today": "2026-01-02"
    }
    days.append(datetime.datetime(2031, 11, 30))
    assert evaluate.main(["--run", str(whole), "--out", str(tmp_path / "after.json")]) == 0
    after = {name: one["after"] for name, one in json.loads((whole / "summary.json").read_text())["evaluation"].items()}
    assert json.loads((tmp_path / "after.json").read_text())["greedy"] == after
