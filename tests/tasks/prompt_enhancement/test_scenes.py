"""Several objects through the command: the oracle draws every kind, and each kind is measured by itself."""

import json

import pytest

from bridges.miniature import path, scenes
from bridges.miniature.scenes import KINDS
from grpo_jax import train
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.tasks.prompt_enhancement_task import _prompts

pytest.importorskip("open_clip")
pytest.importorskip("diffusers")


def test_each_kind_is_measured_and_its_oracle_is_right(tmp_path):
    arguments = ["--training.max_steps=1", "--evaluation.prompts=48", "--evaluation.validation_prompts=1"]
    small = ["--training.prompts_per_batch=4", "--evaluation.samples=0", "--evaluation.every=0"]
    run_dir = tmp_path / "run"
    assert train.main(["--config=prompt_enhancement_scenes", *arguments, *small, f"--run_dir={run_dir}"]) == 0
    evaluation = json.loads((run_dir / "summary.json").read_text())["evaluation"]
    pixels = evaluation["pixel_accuracy"]
    assert pixels["oracle"] >= 0.95 and pixels["before"] <= 0.4 and pixels["unchanged"] <= 0.4
    kinds = [evaluation[f"pixel_accuracy/{kind}"] for kind in KINDS]
    assert [kind["oracle"] >= 0.85 for kind in kinds] == [True] * 6
    for when in ("before", "after", "oracle"):  # 8 prompts of each of the 6 kinds
        assert sum(kind[when] for kind in kinds) / 6 == pytest.approx(pixels[when])


def test_a_column_that_prompts_have_not_is_one_line(tmp_path, capsys):
    few = ["--evaluation.prompts=2", "--evaluation.validation_prompts=1", "--evaluation.samples=0"]
    run_dir = f"--run_dir={tmp_path / 'run'}"
    assert train.main(["--config=prompt_enhancement_scenes", *few, "--evaluation.by=kinds", run_dir]) == 2
    assert "evaluation.by: 2 of 2 held-out prompts have no column 'kinds'" in capsys.readouterr().err


def test_prompts_of_the_harder_world_by_name():
    sizes = {"prompts": 12, "validation_prompts": 6}
    prompts = _prompts(make_config(task="prompt_enhancement", data={"prompts": "miniature_scenes"}, evaluation=sizes))
    assert [len(part) for part in prompts] == [2048, 6, 12]
    assert [row.columns["kind"] for row in prompts.test] == [*KINDS] * 2


def test_a_checker_reads_what_it_knows():
    values = {"data": {"prompts": "builtin"}, "eval_rewards": ["pixel_accuracy"]}
    with pytest.raises(UserError, match=r'data\.prompts "miniature" or "miniature_scenes"'):
        make_config(task="prompt_enhancement", **values)


def test_the_start_gives_the_right_meaning_of_every_word_a_chance():
    """What is to be learned must be drawn now and then, of every word; none is known before."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = path("policy_scenes")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    meanings = {word: value for value, words in scenes.SYNONYMS.items() for word in words}
    chances: dict[str, list[float]] = {word: [] for word in meanings}
    for row in scenes.prompts("train", 400):
        chat = [{"role": "user", "content": row["prompt"]}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        written = row["oracle"].split()
        ids = tokenizer(f"{asked} {row['oracle']}", return_tensors="pt").input_ids
        with torch.no_grad():
            likely = model(ids).logits[0, -len(written) - 1 : -1].softmax(-1)
        of_value = dict(zip(written, likely.gather(1, ids[0, -len(written) :, None])[:, 0].tolist(), strict=True))
        for word in row["prompt"].split():
            if word in meanings and written.count(meanings[word]) == 1:
                chances[word].append(of_value[meanings[word]])
    means = {word: sum(values) / len(values) for word, values in chances.items()}
    assert min(means.values()) >= 0.2 and max(means.values()) <= 0.45, means
