"""Train a task that brings its own compiled blocks of iterations (`tasks.task.Blocks`).

It shares output, checkpoints and progress with `runs.trainer`, and has neither prompts nor judges.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from grpo_jax.config.fields import to_yaml
from grpo_jax.errors import Stopped, UserError
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.processes import enable_compile_cache, join, versions
from grpo_jax.runs.progress import Progress, Record, added, identity_of, require_same, with_total
from grpo_jax.runs.stopping import Callbacks, IterationEvent, stop_requests


def train_blocks(config: Any, open_output: Callable[[Any], Any], callbacks: Callbacks = Callbacks()) -> Record:
    """Train and leave a run directory; return the contents of summary.json, and "stopped"."""
    enable_compile_cache()
    join(config)  # refuses several processes
    clock, again = time.monotonic(), f"--resume --run_dir {config.run_dir} goes on"
    keep = config.training.keep_checkpoints
    with stop_requests() as stop, open_output(config) as output:
        try:
            with stop.at_once():
                blocks = config.task.blocks(config, output.info)
        except Stopped:
            output.info(f"stopped while loading: {again}")
            return {"stopped": True, "iteration": 0}
        with Checkpoints(output.directory.checkpoints, keep=keep, warning=output.warning) as checkpoints:
            iterations, every, state = config.training.iterations, config.training.save_every, blocks.start

            def save(*, wait: bool = False, name: str = "") -> None:
                seconds = with_total(progress.seconds, clock)
                saved = (
                    progress.iteration,
                    blocks.saved(state),
                    {"progress": progress._replace(seconds=seconds)._asdict()},
                )
                if name:
                    checkpoints.save_as(name, *saved)
                else:
                    checkpoints.save(*saved, wait=wait)

            def tell(name: str, metrics: Record) -> None:
                """Call the callback of that name; if it asks to, stop."""
                done, folder = int(metrics.get("step", progress.iteration)), output.directory.path.absolute()
                checkpoint = None if metrics else checkpoints.folder / f"step_{done}"
                try:
                    asked = callbacks.ask(name, IterationEvent(done, iterations, metrics, folder, checkpoint))
                except UserError as error:
                    save(wait=True)
                    saved = f"Saved after iteration {progress.iteration}; fix it and go on with"
                    raise UserError(f"{error}. {saved} --resume --run_dir {config.run_dir}") from error
                if asked and progress.iteration < iterations:
                    output.info(f"{name} asks to stop")
                    stop.set()

            if config.resume and checkpoints.latest_step() is not None:
                progress = Progress.read(checkpoints.read_meta("latest"), checkpoints.folder)
                require_same(progress.identity, config, {}, checkpoints.folder)
                if progress.iteration > iterations:
                    done = progress.iteration
                    raise UserError(f"--resume: {done} iterations are done, and the run is to have {iterations}")
                output.directory.write_config(to_yaml(config.replace(resume=False)))
                state = blocks.restored(checkpoints.restore("latest", blocks.saved(state))[0])
                output.truncate(progress.iteration)
                output.info(f"resumed after iteration {progress.iteration} of {iterations}")
                progress = progress._replace(iterations=iterations, starts=[*progress.starts, progress.iteration])
            else:
                output.truncate(0)
                notes, seconds, line = blocks.measure_start()
                progress = Progress(0, iterations, None, 0, seconds, [0], identity_of(config, {}), notes)
                output.info(line)
                save(wait=True)
            output.start(iterations, progress.iteration)
            while progress.iteration < iterations and not stop.is_set():
                state, rows, seconds, notes = blocks.advance(state, progress.iteration, progress.notes)
                done, seconds = progress.iteration + len(rows), added(progress.seconds, seconds)
                progress = progress._replace(iteration=done, seconds=seconds, notes=notes)
                for row in rows:
                    output.iteration(row)
                for row in rows:
                    tell("on_iteration", row)
                if every and done % every == 0:
                    save(wait=callbacks.on_checkpoint is not None)
                    tell("on_checkpoint", {})
                if config.training.max_hours and time.monotonic() - clock >= 3600 * config.training.max_hours:
                    output.info(f"training.max_hours = {config.training.max_hours:g} are over")
                    break
            save(wait=True)
            if progress.iteration < iterations:
                output.info(f"stopped and saved after iteration {progress.iteration}: {again}")
                return {"stopped": True, "iteration": progress.iteration}
            save(name="final")
            finished = blocks.finish(state, progress.iteration, progress.seconds, progress.notes)
            seconds = with_total(finished.summary["seconds"], clock)
            summary = {
                "suspect": [],
                **finished.summary,
                "seconds": seconds,
                "seed": config.seed,
                "versions": versions(),
            }
            output.finish(finished._replace(summary=summary), config=config, starts=progress.starts)
            return {**summary, "stopped": False}
