"""Data of every kind gives the same rows; instruction and messages follow the config, during and after training."""

import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from support.encoded_prompts import plain_rows
from support.text_task import SHORT, train_here
from support.tiny_models import causal_lm, chat_tokenizer

from grpo_jax import predict
from grpo_jax.config.run import make_config
from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.encoding import make_encode
from grpo_jax.rollout.prompts import load_prompts
from grpo_jax.runs.python_input import from_python

RECORDS = [{"question": f'{c} "tree",\nplease', "solution": f"00{i}"} for i, c in enumerate("abcdefgh")]
COLUMNS = {"prompt": "question", "answer": "solution"}
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Tiny.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}(silent) {% endif %}{% endif %}"
)


def written(folder, kind, records=RECORDS):
    """The records as data of a kind; what `data.prompts` calls it."""
    path = folder / f"p.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif kind in ("csv", "tsv"):
        import csv

        with open(path, "w", newline="", encoding="utf-8-sig") as file:
            sheet = csv.writer(file, delimiter="," if kind == "csv" else "\t")
            sheet.writerows([list(records[0]), *(record.values() for record in records)])
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        import datasets

        if kind == "hub":
            written(folder, "jsonl", records).rename(folder / "train.jsonl")
            return f"hub:{folder}"
        path = folder / "saved"
        datasets.Dataset.from_list(records).save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "saved", "hub"])
def test_every_kind_of_data_gives_the_same_rows(kind, tmp_path):
    rows = load_prompts(written(tmp_path, kind), held_out=0, columns=COLUMNS).train
    assert [(row.prompt, row.columns) for row in rows] == [
        (record["question"], {"answer": record["solution"]}) for record in RECORDS
    ]
    assert len({row.id for row in rows}) == len(rows)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "saved", "hub"])
def test_replaced_data_of_the_same_age_are_read_anew(kind, tmp_path):
    for number, record in enumerate(RECORDS[:2]):
        folder = tmp_path / str(number)
        folder.mkdir()
        place = written(folder, kind, [record])
        (tmp_path / "now").unlink(missing_ok=True)
        (tmp_path / "now").symlink_to(folder)
        for path in folder.rglob("*"):
            os.utime(path, (10**9, 10**9))
        rows = load_prompts(str(place).replace(str(folder), str(tmp_path / "now")), held_out=0, columns=COLUMNS).train
        assert [row.columns for row in rows] == [{"answer": record["solution"]}]


def test_values_of_mixed_types_are_restored(tmp_path):
    import datasets

    parts = [{"type": "text", "text": "b"}]
    records = [{"prompt": [{"role": "user", "content": text}], "wish": text} for text in ("a", parts)]
    datasets.Dataset.from_list(records, on_mixed_types="use_json").save_to_disk(tmp_path / "saved")
    rows = load_prompts(tmp_path / "saved", held_out=0).train
    assert [(row.prompt, row.columns["wish"]) for row in rows] == [("a", "a"), ("b", parts)]


def test_data_columns_renames_columns(tmp_path):
    both = [{"prompt": "old", "question": "new", "answer": 1, "solution": 2}]
    (row,) = load_prompts(both, held_out=0, columns=COLUMNS).train
    assert (row.prompt, row.columns) == ("new", {"answer": 2})
    data = {"columns": {"answer": "solution"}, "held_out": 0.0}
    (row,) = from_python(make_config(task="text", data=data), both, None).prompts.train
    assert (row.prompt, row.columns) == ("old", {"answer": 2, "question": "new"})
    with pytest.raises(
        UserError, match=r"data.columns.answer: no such column, 'sol'; prompts has 'prompt, question, an"
    ):
        load_prompts(both, columns={"answer": "sol"})


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("hub:", "hub:: prompts come from a .* from hub:OWNER/NAME, from reasoning_gym:NAME, or from builtin"),
        ("hub:no_owner_of/this_name", "hub:no_owner_of/this_name cannot be loaded: "),
        ("openai/gsm8k", "openai/gsm8k: prompts come from a .* from hub:openai/gsm8k"),
    ],
)
def test_unknown_names_of_the_hub_are_refused(place, message):
    with pytest.raises(UserError, match=message) as raised:
        load_prompts(place)
    assert "\n" not in str(raised.value)


def test_no_code_of_a_data_set_runs(tmp_path):
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "sums.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_prompts(f"hub:{folder}")
    assert not (tmp_path / "ran").exists()


def test_splits_may_be_separate_files(tmp_path):
    for name, letters in (("train", "abcd"), ("dev", "ef"), ("test", "g"), ("more", "xga")):
        (tmp_path / f"{name}.txt").write_text("".join(f"{c} tree\n" for c in letters))
    places = {"validation": str(tmp_path / "dev.txt"), "test": str(tmp_path / "test.txt")}
    parts = load_prompts(tmp_path / "train.txt", **places)
    assert [[row.prompt[0] for row in part] for part in parts] == [list("abcd"), list("ef"), ["g"]]
    assert len({row.id for part in parts for row in part}) == 7
    assert [len(part) for part in load_prompts(tmp_path / "train.txt", test=places["test"])] == [4, 0, 1]
    with pytest.raises(UserError, match=r"data.test: 1 of its prompts are in another part too, such as 'a tree'"):
        load_prompts(tmp_path / "train.txt", test=str(tmp_path / "more.txt"))
    with pytest.raises(UserError, match=r"data.test: 2 of its prompts are in another part too, such as 'e tree'"):
        load_prompts(tmp_path / "train.txt", validation=places["validation"], test=places["validation"])
    (tmp_path / "split.jsonl").write_text('{"prompt": "z", "split": "test"}')
    with pytest.raises(UserError, match=r'data.test: its rows have a "split"; name one file for all'):
        load_prompts(tmp_path / "train.txt", test=str(tmp_path / "split.jsonl"))
    with pytest.raises(UserError, match=r"data.test: expected nothing beside run\(prompts=…\), got 'x.txt'"):
        from_python(make_config(task="text", data={"test": "x.txt"}), ["a"], None)


def templated():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_prompts_are_as_transformers_has_them(system, thinking):
    tokenizer = templated()
    section = DataSection(system_prompt=system, chat_template_options={"enable_thinking": thinking})
    encoded = make_encode(tokenizer, section, pad_id=0)(plain_rows(["a fox"]))
    said = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": "a fox"}]
    expected = tokenizer.apply_chat_template(said, add_generation_prompt=True, enable_thinking=thinking)["input_ids"]
    assert encoded.tokens[encoded.mask].tolist() == expected
    assert ("(silent)" in tokenizer.decode(expected)) is not thinking


def test_a_conversation_that_has_a_system_message_keeps_it():
    tokenizer = templated()
    own = [{"role": "system", "content": "Sing."}, {"role": "user", "content": "a fox"}]
    rows = load_prompts([{"prompt": own}, {"prompt": own[1:]}], held_out=0).train
    encoded = make_encode(tokenizer, DataSection(system_prompt="Be brief."), pad_id=0, rows=rows)(rows)
    first, second = (tokenizer.decode(ids[mask]) for ids, mask in zip(encoded.tokens, encoded.mask, strict=True))
    assert (
        "Sing." in first and "Be brief." not in first and second.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    )


def test_predict_encodes_prompts_as_training_did(place, tmp_path, capsys):
    """CSV under other names and a test file, through the command; then as a function, and by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = causal_lm(tmp_path / "chatting", num_hidden_layers=1)
    (policy / "chat_template.jinja").write_text(TEMPLATE)
    records = "".join(f"{c} tree,{i}\n" for i, c in enumerate("abcdefgh"))
    (tmp_path / "p.csv").write_text("question,solution\n" + records)
    (tmp_path / "t.jsonl").write_text('{"question": "x tree", "solution": 9}\n')
    data = {"data.prompts": "p.csv", "data.test": "t.jsonl", "data.columns": json.dumps(COLUMNS)}
    data = {name: str(tmp_path / value) if "." in value else value for name, value in data.items()}
    said = {
        "data.system_prompt": "Be brief.",
        "data.chat_template_options": "{enable_thinking: true}",
        "data.max_prompt_tokens": "128",
    }
    named = {"policy.path": str(policy), "rewards": "grpo_jax.rewards:numeric_answer", **data, **said}
    run, words = tmp_path / "run", [f"--{name}={value}" for name, value in named.items()]
    assert train_here(place.config, run, *words, "--training.max_steps=1", *SHORT) == 0
    assert "8 train, 0 validation, 1 test" in capsys.readouterr().out
    table = pyarrow.parquet.read_table(run / "completions" / "step_000001.parquet").to_pydict()
    assert np.isfinite(table["reward/numeric_answer"]).all()

    tokenizer, model = (
        AutoTokenizer.from_pretrained(run / "policy"),
        AutoModelForCausalLM.from_pretrained(run / "policy"),
    )
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a tree"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, enable_thinking=True, return_tensors="pt")
    ids = ids["input_ids"]
    asked = ids.shape[1]
    with torch.no_grad():
        for _ in range(8):
            token = model(ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], dim=1)
            if token.item() in model.generation_config.eos_token_id:
                break
    expected = tokenizer.decode(ids[0, asked:], skip_special_tokens=True)
    assert predict.main(["--run", str(run), "--prompt", "a tree", "a tree"]) == 0
    assert capsys.readouterr().out == f"{expected.strip()}\n" * 2
    (tmp_path / "asked.txt").write_text("a tree\n\n")
    assert predict.main(["--run", str(run), "--file", str(tmp_path / "asked.txt")]) == 0
    assert json.loads(capsys.readouterr().out) == {"prompt": "a tree", "completion": expected.strip()}
    for words, wrong in (
        (["--file", "absent.txt"], "--file: absent.txt: cannot be read"),
        (["--file", "/dev/null"], "error: --file: /dev/null: expected at least one line\n"),
        (["--prompt", "a tree", "--checkpoint", "77"], "77"),
        (["--promt", "a tree"], "--promt: no such option; did you mean --prompt?"),
    ):
        assert predict.main(["--run", str(run), *words]) == 2
        assert wrong in capsys.readouterr().err


REWARDS = """
def exact(completions, answer, **columns):
    return [0.0] * len(completions)

def known(completions, wish, trainer_state, scale=1):
    return [0.0] * len(completions)
"""


def test_a_reward_with_an_unknown_column_is_refused_before_loading(place, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "config.json").write_text("{}")  # a folder without weights
    words = [f"--rewards={tmp_path}/mine.py:known,{tmp_path}/mine.py:exact", f"--policy.path={tmp_path}"]
    assert train_here(place.config, tmp_path / "run", *words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "reward exact: no column fills its argument 'answer'; the data has wish: name one by data.columns.a" in line


def test_one_prompt_repeated_is_trained_on_without_held_out_prompts(place, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": "a tree", "wish": c}) + "\n" for c in "abcd"))
    words = [f"--data.prompts={tmp_path / 'p.jsonl'}", "--training.max_steps=1"]
    assert train_here(place.config, tmp_path / "run", *words, *SHORT) == 0
    shown = capsys.readouterr().out
    assert (
        "4 train, 0 validation, 0 test" in shown and "warning: all rows have the same prompt, so none is held" in shown
    )
