"""A real language model as the policy of the miniature's renderer, from three examples.

    python benchmarks/small_writer.py --model FOLDER [--arms gdpo shuffled] [--seeds 200] [--out DIR]
                                      [--section.field VALUE ...]

FOLDER holds SmolLM2-135M-Instruct (docs/recipes/arithmetic.md) or another chat model; LoRA trains it. Requests,
renderer, CLIP and rewards are those of the default run. Three training requests with their oracle's rewrites stand
before each request, as turns of the chat. "shuffled" permutes the rewards within each group. Prints pixel accuracy
of held-out requests, and seconds. The temperature was chosen on seed 100. At a learning rate of 5e-4 one seed of
three collapses.
"""

import argparse
import json
from pathlib import Path

import miniature

from bridges.miniature import world

ARMS = ("gdpo", "shuffled")
SETTINGS = """--config prompt_enhancement_miniature --policy.lora.rank 16 --policy.matmul_precision bfloat16
--data.max_prompt_tokens 128 --sampling.max_new_tokens 16 --sampling.group_size 12 --sampling.temperature 0.7
--training.prompts_per_batch 4 --training.inner_epochs 1 --training.max_steps 120 --training.save_every 0
--optimizer.learning_rate 2e-4 --algorithm.kl_coef 0 --algorithm.entropy_coef 0 --evaluation.every 0
--evaluation.samples 2 --eval_rewards grpo_jax.tasks.pictures:pixel_accuracy"""


def write_requests(path: Path, counts: dict[str, int]) -> None:
    """The miniature's requests as chats: three examples, which are not trained on, then the request."""
    rows = {split: world.prompts("world", split, count) for split, count in counts.items()}
    examples = [row for row in rows["train"] if len(row["requested"]) >= 4][:3]
    turns = (("user", "prompt"), ("assistant", "oracle"))
    shots = [{"role": role, "content": row[column]} for row in examples for role, column in turns]
    with path.open("w") as file:
        for split, some in rows.items():
            for row in (row for row in some if row not in examples):
                prompt = [*shots, {"role": "user", "content": row["prompt"]}]
                file.write(json.dumps({**row, "prompt": prompt, "split": split}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[200])
    parser.add_argument("--out", type=Path, default=Path("runs/small_writer"))
    options, extra = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_requests(options.out / "requests.jsonl", {"train": 2048, "validation": 32, "test": 128})
    given = [*SETTINGS.split(), "--policy.path", options.model, "--data.prompts", f"{options.out}/requests.jsonl"]
    measures = ("unchanged", "before", "after", "before_sampled", "after_sampled", "oracle")
    print(f"| arm | seed | {' | '.join(measures)} | iterations | seconds of one |\n{'|---' * 10}|")
    for arm in options.arms:
        for seed in options.seeds:
            run_dir, settings = options.out / f"{arm}_{seed}", [*given, "--seed", str(seed), *extra]
            found = miniature.summary(run_dir, settings, miniature.control(arm, seed))
            values = map(found["evaluation"]["pixel_accuracy"].get, measures)
            cells = " | ".join("–" if value is None else f"{value:.3f}" for value in values)
            each = found["seconds"]["total"] / found["iterations"]
            print(f"| {arm} | {seed} | {cells} | {found['iterations']} | {each:.1f} |", flush=True)
