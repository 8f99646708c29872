"""--plan --judges: its seconds are the formula's over what a run measured or a command line gives."""

import json
import shutil

import pytest
from support.text_task import train_here

from grpo_jax.config.command_line import parse
from grpo_jax.planning.copies import Pool, completions_of, share_of, stages_of, work_of
from grpo_jax.planning.measured import Measured
from grpo_jax.planning.pace import turns
from grpo_jax.planning.stages import iteration_seconds
from grpo_jax.runs.directory import read_metrics
from grpo_jax.train import main

BATCH = ("--config=prompt_enhancement_miniature", "--training.prompts_per_batch=32", "--sampling.group_size=8")
GIVEN = {"sample": 8.0, "render": 64.0, "score": 2.0, "update": 6.0}
TWO = ("--judges.renderer.replicas=2", "--judges.renderer.batch=8")
NUMBERS = "--judges=" + ",".join(f"{name}={seconds:g}" for name, seconds in GIVEN.items())


def configured(*arguments):
    return parse([*BATCH, *arguments])


def seconds_of(*arguments, measured=None):
    config = configured(*arguments)
    return iteration_seconds(stages_of(config, work_of(measured or Measured(GIVEN, "here"), config)))


def said(capsys, *arguments, code=0):
    assert main([*arguments]) == code
    captured = capsys.readouterr()
    assert captured.err == "" or code == 2
    return captured.out if code == 0 else captured.err


def test_replicas_devices_chunks_and_lag_take_their_shares():
    assert seconds_of() == 80
    four = ("--training.chunk_prompts=8", "--judges.renderer.replicas=8", "--judges.renderer.batch=8")
    assert seconds_of(*four) == pytest.approx((8 + 8 + 2) / 4 + 0.75 * 8 + 6)
    ahead = (*four, "--training.lag=1")
    assert seconds_of(*ahead) == 14  # sampler and update take turns
    assert seconds_of(*ahead, "--policy.sampler_devices=own") == pytest.approx((10.5 + 6) / 2)
    assert seconds_of(*ahead, "--policy.mesh.fsdp=2") == pytest.approx(8)
    half = Measured(GIVEN, "here", completions=128)
    assert seconds_of(measured=half) == 160
    run = configured(*four, "--training.prompts_per_batch=16", "--policy.mesh.fsdp=2")
    work = work_of(Measured(GIVEN, "there", config=run), run)
    assert {name: one * completions_of(run) for name, one in work.items()} == pytest.approx(
        {"sample": 16, "render": 512, "score": 2, "update": 12}
    )


def test_a_judges_actors_do_whole_batches_of_a_chunk():
    """Against handing batch after batch to the actor that has least."""
    for replicas in range(1, 9):
        for batch in range(1, 7):
            for rows_in_all in range(1, 40):
                load, left = [0] * replicas, rows_in_all
                while left:
                    load[load.index(min(load))] += min(batch, left)
                    left -= min(batch, left)
                pool = Pool(replicas, batch, 1.0)
                assert pool.share(rows_in_all) * rows_in_all == pytest.approx(max(load))


def test_even_batches_keep_actors_busy():
    assert Pool(6, 5, 1.0).even(32) == 3 and Pool(60, 8, 1.0).even(256) == 5 and Pool(8, 4, 1.0).even(32) == 0
    assert Pool(2, 4, 1.0).even(9) == 0  # of 3 rows each one actor had 6, of 4 it has 5


def test_of_several_scorers_the_one_with_fewest_replicas_decides():
    judges = ("--judges.scorer.replicas=8", "--judges.scorer.batch=1", "--judges.other=open_clip")
    assert share_of(configured(*judges), "score") == 1
    assert share_of(configured(*judges, "--judges.other.replicas=2"), "score") == 0.5
    assert share_of(configured(*judges), "render") == 1


def test_turns_are_what_their_words_come_to():
    pool = ("--judges.renderer.replicas=6", "--judges.renderer.batch=5", "--judges.renderer.resources={num_gpus: 1}")
    config = configured(*pool, "--training.chunk_prompts=4")
    work = work_of(Measured(GIVEN, "here"), config)
    found = turns(config, work)
    assert {turn.words.split()[0].removeprefix("--") for turn in found} == {
        *("judges.renderer.replicas", "judges.renderer.batch", "judges.scorer.replicas", "training.chunk_prompts"),
        *("policy.mesh.fsdp", "training.lag"),
    }
    assert [turn.seconds for turn in found] == sorted(turn.seconds for turn in found)
    for turn in found:
        after = configured(*pool, "--training.chunk_prompts=4", *turn.words.split())
        assert turn.seconds == iteration_seconds(stages_of(after, work))
    assert [(turn.words, turn.seconds, turn.cards) for turn in found[:2]] == [
        ("--training.lag 1", 14, 7),  # the renderer's seven batches in turns of six
        ("--judges.renderer.replicas 12 --judges.renderer.batch 3", 15.0, 13),
    ]


def test_turns_that_a_run_would_refuse_are_not_offered():
    config = configured("--devices.renderer=gpu:0", "--devices.scorer=gpu:0")
    found = {turn.words for turn in turns(config, work_of(Measured(GIVEN, "here"), config), (16.0,))}
    assert "--judges.renderer.replicas 2 --devices.renderer cpu" in found
    assert not any("fsdp" in words or "own" in words for words in found)  # there is one card


def test_the_command_tells_stages_the_slowest_and_the_next_turn(capsys):
    shown = said(capsys, *BATCH, "--plan", NUMBERS, "--training.chunk_prompts=8", *TWO)
    lines = shown.splitlines()
    assert "  render       64.00     32.00  renderer, 2 replicas" in lines
    assert f"An iteration: {10.5 + 24 + 6:.2f} s, 6.32 completions a second." in lines
    assert "The slowest stage: render." in lines
    best = lines[lines.index("Next turns, each alone, the best first:") + 1].split()
    assert best[:3] == ["--judges.renderer.replicas", "4", f"{6.5 + 12 + 6:.2f}"]
    assert any("; off-policy by one iteration" in line for line in lines if "--training.lag 1" in line)
    shown = said(capsys, *BATCH, "--plan", NUMBERS, "--judges.renderer.replicas=60", "--judges.renderer.batch=8")
    assert "renderer: a chunk of 256 completions is 32 batches of 8: 60 replicas are busy 53%" in shown
    assert "--judges.renderer.batch 5 " in shown


def test_parts_that_are_placed_on_one_card_take_turns(capsys, not_compiled):
    config = configured("--training.chunk_prompts=8")
    stages = stages_of(config, work_of(Measured(GIVEN, "here"), config), (16.0, 16.0, 16.0))
    assert iteration_seconds(stages) == 72.5
    shown = said(capsys, *BATCH, "--plan", NUMBERS, "--training.chunk_prompts=8", "--device_memory_gib=16,16")
    assert "An iteration: 74.00 s" in shown  # renderer and scorer have the second
    assert shown.endswith("It fits.\n")


# ---------------------------------------------------------------------------------------------------- a run's seconds


@pytest.fixture(scope="module")
def run(place, tmp_path_factory):
    """A tiny run of four iterations, its seconds written over: what a machine takes is no matter of a test."""
    folder = tmp_path_factory.mktemp("pace") / "run"
    short = ("--training.max_steps=4", "--training.chunk_prompts=2", "--evaluation.every=0")
    assert train_here(place.config, folder, *short) == 0
    found = read_metrics(folder / "metrics.jsonl")
    assert all({"seconds/sample", "seconds/score", "seconds/update", "seconds/total"} <= row.keys() for row in found)
    for row, factor in zip(found, (50, 1, 3, 2), strict=True):
        row |= {"seconds/sample": factor, "seconds/score": 3 * factor, "seconds/update": 2 * factor}
        row["seconds/total"] = 6 * factor
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


@pytest.fixture
def plan(run, capsys):
    """What the command says of the run's own config, which names the folder too."""
    return lambda *words, code=0: said(capsys, f"--config={run / 'config.yaml'}", "--plan", *words, code=code)


def test_a_runs_medians_behind_its_first_iteration(run, plan):
    told = plan("--judges")
    assert f"seconds of an iteration of 16 completions: {run}, medians of 3 iterations behind the first" in told
    assert told == plan("--judges", str(run)) == plan(f"--judges={run / 'metrics.jsonl'}")
    assert "an iteration of that run: 12.00 s measured, 11.00 s by this reckoning" in told  # (2 + 6)/2 + 6/2 + 4
    assert "  score         6.00      6.00  the run's process\n" in told
    assert "An iteration: 11.00 s" in told and "The slowest stage: score." in told
    twice = plan("--judges", "--training.prompts_per_batch=8", "--training.chunk_prompts=4")
    assert "  sample        2.00      4.00  policy, 1 device" in twice and "An iteration: 22.00 s" in twice


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--judges=nowhere", "nowhere: no metrics there; name a run's folder"),
        ("--judges=sample=1,draw=2,update=3", "draw is no stage; expected read, sample, render, score,"),
        ("--judges=sample=1,update=-3", "update: expected seconds of an iteration, a number >= 0, got '-3'"),
        ("--judges=sample,update=3", "sample: expected seconds of an iteration"),
        ("--judges=sample=1,sample=2,update=3", "sample stands there twice"),
        ("--judges=sample=1,update=3,completions=1.5", "completions: expected how many an iteration had"),
        ("--judges=sample=1,score=3", "the command line has no seconds of update; expected --judges sample=12"),
    ],
)
def test_mistakes_are_one_line(words, message, plan):
    error = plan(words, code=2)
    assert error.startswith("error: --judges") and error.count("\n") == 1 and message in error


def test_runs_that_do_not_tell_are_refused(run, plan, tmp_path, capsys):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0])
    assert "one iteration alone" in plan(f"--judges={tmp_path}", code=2)
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert "no config.yaml beside it" in plan(f"--judges={tmp_path}", code=2)
    shutil.copy(run / "config.yaml", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(lines).replace('"seconds/score": 3', '"seconds/score": -3'))
    assert "seconds/score: expected numbers >= 0" in plan(f"--judges={tmp_path}", code=2)
    (tmp_path / "metrics.jsonl").write_text("".join(lines).replace("seconds/update", "seconds/other"))
    assert "has no seconds of update" in plan(f"--judges={tmp_path}", code=2)
    error = said(capsys, *BATCH, "--plan", f"--judges={run}", code=2)
    assert "has no seconds of render, in which judges.renderer works" in error
    assert "say which run was measured" in said(capsys, *BATCH, "--plan", "--judges", code=2)
    assert "has no language policy" in said(capsys, "--task=cartpole", "--plan", "--judges=sample=1,update=1", code=2)
    assert "add --plan" in said(capsys, *BATCH, "--judges=sample=1,update=1", code=2)


def test_help_says_how_it_is_asked(capsys):
    with pytest.raises(SystemExit):
        main(["--plan", "--judges", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "grpo plan [--device_memory_gib GIB,GIB,…] [--judges [RUN_DIR]]" in shown
    assert "a run's seconds or by sample=12,score=40,update=9" in shown


def test_judges_as_a_mapping_are_still_the_configs(capsys):
    words = ("--task=text", "--rewards=[{name: far}]", "--judges", '{far: {kind: http, url: "http://localhost:1/"}}')
    assert "score         2.00      2.00  far, in the run's process" in said(
        capsys, *words, "--plan", "--judges=sample=1,score=2,update=1"
    )
