"""One full GRPO iteration in grpo_jax and in TRL: the same model, the same work, float32.

    python benchmarks/grpo_iteration.py [--cases small] [--threads 1] [--rounds 2] ...

An iteration samples G completions of every prompt (temperature 1, whole vocabulary, no end of sequence), computes the
reference's log-probabilities (KL 0.04), rewards and group advantages, and makes one AdamW update behind a norm clip.
Weights are random, from one folder that transformers wrote. Every library runs in a process and an environment of its
own, pinned to the cores it may use; in each round they take turns, in every other one from the last to the first. A
process runs one iteration that compiles (timed apart, `first`) and `iterations` more; seconds are medians over all of
these, peak memory is the process's. A ratio of times is of one round, in which both met the same machine; told are the
median of all rounds, the least and the largest.

TRL runs with gradient checkpointing off and on, grpo_jax with `policy.remat` as it is by default and with `layer`, its
gradient checkpointing; after the first round only the faster goes on. Compared are the times of each library's fastest
variant, and the memory of the one that takes least; where completions end by themselves (`unequal`) a time is that of a
token. `ours_bfloat16` is grpo_jax with `policy.matmul_precision: bfloat16`, `trl_bfloat16` TRL with `bf16`, both over
float32 weights: libraries of their own, named with `--libraries`. So is `tunix`, in an environment of its own
(`--tunix_python`, with google-tunix and jax), whose gradient checkpointing is `decoder`. A peer without its package is
skipped with one line. A worker that fails is reported, and makes the exit status 1. Writes JSON and prints tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import iteration_work as work

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
VARIANTS = {
    "ours": ("", "layer"),
    "trl": ("plain", "checkpointing"),
    "ours_bfloat16": ("bfloat16",),
    "trl_bfloat16": ("bfloat16",),
    "tunix": ("", "decoder"),
}
PACKAGES = {"tunix": "google-tunix jax"}  # of peers that may be absent, for pip
# Rounds and timed iterations of each case: the whole takes some 40 minutes on two cores.
PLAN = {
    "small": (2, 3),
    "large-vocab": (1, 1),
    "long-prompt": (2, 2),
    "pictures": (2, 2),
    "unequal": (2, 3),
    "tiny-unequal": (1, 1),
    "tiny": (1, 1),
}
PAIRS = [
    ("ours", "trl"),
    ("ours_bfloat16", "trl"),
    ("ours_bfloat16", "trl_bfloat16"),
    ("ours_bfloat16", "ours"),
    ("ours", "tunix"),
]
TUNABLES = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # of every worker


CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def make_folder(case: work.Case, root: Path) -> Path:
    """A folder of the case's shape with random weights and a tokenizer of one word per token."""
    folder = root / case.shape
    if folder.is_dir():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    make_model(case).save_pretrained(folder)
    # Padding and end lie outside the model's vocabulary: no completion can hold them.
    names = [*work.words(case), "<pad>", "<end>"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = list(work.VISION) if case.picture else []
    pad, end = ("<pad>", "<end>") if case.end is None else (names[0], names[case.end])  # what is padded is read
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, additional_special_tokens=marks
    )
    if case.picture:
        from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

        size = {"shortest_edge": case.picture**2, "longest_edge": case.picture**2}
        images, videos = Qwen2VLImageProcessor(size=size), Qwen2VLVideoProcessor()
        Qwen2VLProcessor(images, fast, videos, chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    else:
        fast.save_pretrained(folder)
    return folder


def make_model(case: work.Case):
    """The case's Qwen2, or with pictures Qwen2-VL."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = dict(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=case.mlp,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        max_position_embeddings=case.positions,
        bos_token_id=None,
        eos_token_id=case.vocabulary - 1,  # a folder names one; workers stop there where `case.end` says so
        pad_token_id=None,
    )
    if not case.picture:
        model = Qwen2ForCausalLM(Qwen2Config(**text, tie_word_embeddings=True))
        return model if case.end is None else ending(model, case)
    half = case.head_size // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    marks = {name: case.vocabulary - len(names) + i for i, name in enumerate(names)}
    vision = dict(
        depth=case.tower_layers, embed_dim=case.tower_width, num_heads=4, hidden_size=case.hidden, patch_size=14
    )
    config = Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, tie_word_embeddings=True, **marks
    )
    return Qwen2VLForConditionalGeneration(config)


def ending(model, case: work.Case):
    """The model with its first dimension the same for all tokens, and larger for the end: p(end) ≈ 1 / case.ends."""
    import torch

    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = 1
        states = model.model(torch.randint(case.vocabulary, (8, case.prompt_tokens))).last_hidden_state
        embeddings[case.end, 0] += math.log((case.vocabulary - 1) / (case.ends - 1)) / states[..., 0].mean()
    return model


def environment(threads: int) -> dict[str, str]:
    """Return a worker's environment, the same for all libraries."""
    count = str(threads)
    return {
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "GLIBC_TUNABLES": TUNABLES,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }


def run_worker(library: str, given: work.Assignment, python: str, env: dict[str, str] | None = None) -> dict:
    """Run one process of one library; return its report, or {"error": the end of its output}."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: given.threads])
    script = BENCHMARKS / f"iteration_{library.partition('_')[0]}.py"
    command = ["taskset", "-c", cores, python, str(script), *work.command_line(given)]
    if env is None:
        env = environment(given.threads)
        if not library.startswith("ours"):
            env.pop("PYTHONPATH")
    start = time.perf_counter()
    done = subprocess.run(command, env=env, cwd=given.out.parent, capture_output=True, text=True)
    if done.returncode or not given.out.exists():
        said = (done.stderr or done.stdout).strip().splitlines()[-15:]
        return {"error": f"exit status {done.returncode}: " + "\n".join(said)}
    return {**json.loads(given.out.read_text()), "process_seconds": time.perf_counter() - start}


def absent(library: str, python: str) -> bool:
    """Whether a peer that may be absent has no package in its environment."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({library!r}) is None)"
    return library in PACKAGES and subprocess.run([python, "-c", code]).returncode != 0


def measure(
    case: work.Case, threads: int, libraries: dict[str, str], rounds: int, iterations: int, clock: str, root: Path
):
    """Runs of every library and variant, taking turns: {"library/variant": [report, ...]}."""
    folder = make_folder(case, root)
    runs: dict[str, list[dict]] = {}
    skipped: set[str] = set()
    for turn in range(rounds):
        for library in sorted(libraries, reverse=turn % 2 == 1):
            python = libraries[library]
            for variant in VARIANTS[library]:
                name = f"{library}/{variant}" if variant else library
                if name in skipped:
                    continue
                out = root / f"{case.name}-{threads}-{name.replace('/', '-')}-{turn}.json"
                given = work.Assignment(case, folder, iterations + 1, threads, variant, clock, out)
                report = run_worker(library, given, python)
                runs.setdefault(name, []).append(report)
                print(progress(case, threads, name, report), file=sys.stderr, flush=True)
            skipped |= slower_variants(runs, library)
    return runs


def progress(case: work.Case, threads: int, name: str, report: dict) -> str:
    place = f"{case.name} threads={threads} {name}"
    if "error" in report:
        return f"{place}: FAILED {report['error']}"
    row = work.median_row(report["iterations"][1:])
    return f"{place}: " + " ".join(f"{key} {value:.2f}" for key, value in row.items())


def slower_variants(runs: dict[str, list[dict]], library: str) -> set[str]:
    """Variants of a library that another of it beats: they need no further round."""
    rows = {name: summary(reports) for name, reports in runs.items() if name.split("/")[0] == library}
    times = {name: row["total"] for name, row in rows.items() if "total" in row}
    return set(times) - {min(times, key=times.get)} if times else set()


def summary(reports: list[dict]) -> dict:
    """Medians over every iteration but the first of each process; peak memory and first iteration over processes."""
    good = [report for report in reports if "error" not in report]
    failures = [report["error"] for report in reports if "error" in report]
    if not good:
        return {"failures": failures}
    rows = [row for report in good for row in report["iterations"][1:]]
    return {
        **work.median_row(rows),
        "first": statistics.median(report["iterations"][0]["total"] for report in good),
        "peak_mib": statistics.median(report["peak_mib"] for report in good),
        "iterations": len(rows),
        "ms_per_token": 1000 * sum(row["total"] for row in rows) / sum(row["tokens"] for row in rows),
        "tokens": statistics.mean(row["tokens"] for row in rows),
        "spread": [min(row["total"] for row in rows), max(row["total"] for row in rows)],
        "versions": good[0]["versions"],
        "failures": failures,
    }


def ratios(runs: dict[str, list[dict]], *, by_token: bool = False) -> dict[str, list[float]]:
    """One's best over the other's, round by round: "time ours/trl" and so on; by tokens where their number differs.

    A round in which either failed has none. Memory is compared once, of what takes least.
    """
    clock = "ms_per_token" if by_token else "total"
    rounds = range(max(map(len, runs.values()), default=0))
    times = [{name: summary(reports[turn : turn + 1]) for name, reports in runs.items()} for turn in rounds]
    whole = [{name: summary(reports) for name, reports in runs.items()}]
    found = {
        f"{kind} {mine}/{peer}": [least(mine, rows, key) / least(peer, rows, key) for rows in every]
        for kind, key, every in (("time", clock, times), ("memory", "peak_mib", whole))
        for mine, peer in PAIRS
    }
    kept = {name: [value for value in values if not math.isnan(value)] for name, values in found.items()}
    return {name: values for name, values in kept.items() if values}


def least(library: str, rows: dict[str, dict], key: str) -> float:
    """Of the library's variants; NaN where there is none."""
    found = [row[key] for name, row in rows.items() if name.split("/")[0] == library and key in row]
    return min(found, default=math.nan)


def told(values: list[float]) -> str:
    """Return the median of the rounds, with their range if there are several."""
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def table(results: list[dict]) -> str:
    """Two Markdown tables: seconds and memory of every run, and the ratios."""
    lines = [
        "| case | threads | library | sampling s | log-probabilities s | update s | iteration s | ms per completion | "
        "first s | peak MiB |",
        "|" + "---|" * 10,
    ]
    for result in results:
        for name, row in result["libraries"].items():
            start = f"| {result['case']} | {result['threads']} | {name} |"
            if "total" in row:
                case = work.CASES[result["case"]]
                seconds = " | ".join(f"{row[key]:.2f}" for key in (*work.PHASES, "total"))
                each = 1000 * row["total"] / (case.prompts * case.group)
                lines.append(f"{start} {seconds} | {each:.1f} | {row['first']:.1f} | {row['peak_mib']:.0f} |")
            if row["failures"]:
                lines.append(f"{start} {len(row['failures'])} process(es) failed | | | | | | |")
    names = list(dict.fromkeys(name for result in results for name in result["ratios"]))
    lines += ["", f"| case | threads | {' | '.join(names)} |", "|" + "---|" * (2 + len(names))]
    for result in results:
        cells = [told(result["ratios"][name]) if name in result["ratios"] else "–" for name in names]
        lines.append(f"| {result['case']} | {result['threads']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> dict:
    """Describe this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    load = round(os.getloadavg()[0], 2)  # of others: above 0.5 the figures are those of a busy machine
    return {"processor": model, "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"), "load_before": load}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(work.CASES), default=["small", "long-prompt", "large-vocab"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, help="instead of the case's own")
    parser.add_argument("--iterations", type=int, help="instead of the case's own")
    parser.add_argument("--libraries", nargs="+", choices=list(VARIANTS), default=["ours", "trl"])
    parser.add_argument(
        "--clock", choices=list(work.CLOCKS), default="wall", help="cpu: for a busy machine, one thread"
    )
    parser.add_argument("--python", default=sys.executable, help="with grpo_jax")
    parser.add_argument("--trl_python", default=sys.executable, help="with the extra `oracles`")
    parser.add_argument("--tunix_python", default=sys.executable, help="with google-tunix and jax")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "grpo_iteration.json")
    return parser.parse_args(arguments)


def main() -> int:
    chosen = options()
    pythons = {"ours": chosen.python, "trl": chosen.trl_python, "tunix": chosen.tunix_python}
    libraries = {name: pythons[name.partition("_")[0]] for name in chosen.libraries}
    for name in [name for name, python in libraries.items() if absent(name, python)]:
        print(f"{name}: skipped; {libraries.pop(name)} -m pip install {PACKAGES[name]}", file=sys.stderr)
    outcome = {"machine": machine(), "clock": chosen.clock, "tunables": TUNABLES, "results": []}
    with tempfile.TemporaryDirectory() as root:
        for name in chosen.cases:
            rounds, iterations = PLAN[name]
            rounds, iterations = chosen.rounds or rounds, chosen.iterations or iterations
            for count in chosen.threads:
                runs = measure(work.CASES[name], count, libraries, rounds, iterations, chosen.clock, Path(root))
                rows = {library: summary(reports) for library, reports in runs.items()}
                outcome["results"].append(
                    {
                        "case": name,
                        "threads": count,
                        "libraries": rows,
                        "ratios": ratios(runs, by_token=work.CASES[name].ends > 0),
                        "runs": runs,
                    }
                )
                chosen.out.write_text(json.dumps(outcome, indent=1) + "\n")
    print(table(outcome["results"]))
    return int(any(row["failures"] for result in outcome["results"] for row in result["libraries"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
