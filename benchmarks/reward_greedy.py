"""Greedy answers of an adapter, by transformers and PEFT; called by time_to_reward.py and reasoning_gym_tasks.py."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import reward_work as task
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def answers(folder: Path, adapter: Path | None, rows: list[dict], new_tokens: int) -> list[str]:
    """Return the model's answer to each prompt; without an adapter that before training."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter).merge_and_unload() if adapter else model
    chats = [task.chat(row["prompt"]) for row in rows]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    written = model.eval().generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    given = task.assignment()  # the variant is the adapter's folder, or "base"
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    texts = answers(given.folder, None if given.variant == "base" else Path(given.variant), rows, given.new_tokens)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    rewards = given.functions[0](columns.pop("prompt"), texts, **columns)
    report = {"reward": statistics.mean(rewards), "right": rewards.count(1.0) / len(rows), "examples": texts[:3]}
    given.out.write_text(json.dumps(report))
