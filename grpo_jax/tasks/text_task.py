"""The task for your own prompts and rewards; completions are judged unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from grpo_jax.config.fields import PositiveCount, require
from grpo_jax.config.named import load_object
from grpo_jax.config.run import Config
from grpo_jax.rollout.data import PromptSet
from grpo_jax.rollout.encoding import ParsedCompletion, as_is, continued
from grpo_jax.rollout.env_adapters import ToolEpisodes
from grpo_jax.rollout.openenv import PREFIX
from grpo_jax.rollout.prompts import make_prompt_set, prompts_of
from grpo_jax.rollout.tools import toolboxes
from grpo_jax.tasks.task import Task, TaskData, TaskSetup, TurnEnvironment


class Text(Task):
    """Any Hugging Face folder, prompts from a file, rewards by import path."""

    environment: str = ""
    """Environment between turns (sampling.turns), package.module:function or file.py:function: step(rows, episodes) →
    for each an `Observation`, a text, or None to end the episode; empty with data.tools."""
    pictures: bool = False
    """Load the policy's vision tower, for an environment or tools that show pictures."""
    seeds: PositiveCount = 1024
    """Number of prompts of a class of data.tools without data.prompts; a sixteenth as many are held out."""

    defaults: ClassVar[Mapping[str, Any]] = {"sampling": {"max_new_tokens": 128}}  # room for an answer

    def check(self, config: Config) -> None:
        """Refuse an environment without turns, and turns without an environment."""
        turns, tools = config.sampling.turns, config.data.tool_names
        require(not self.environment or turns > 1, "sampling.turns", "at least 2 with task.environment", turns)
        require(not tools or turns > 1, "sampling.turns", "at least 2 with tools that are called", turns)
        require(
            bool(self.environment or tools) or turns == 1,
            "task.environment",
            "a function with sampling.turns above 1, or data.tools by name",
            None,
        )
        require(not (self.environment and tools), "task.environment", "nothing with data.tools by name", tools)

    def parser(self, config: Config) -> Callable[[str, str], ParsedCompletion]:
        """Return the parser that keeps completions unchanged, or adds the prompt to a continuation."""
        return continued if config.data.form == "append" else as_is

    def load(self, setup: TaskSetup) -> TaskData:
        """Load the prompts."""
        section, prompts = setup.config.data, setup.prompts
        boxes = toolboxes(section)
        for name in filter(lambda name: name.startswith(PREFIX), section.tool_names):
            setup.info("tools", f"{name}: the policy's actions are sent to this server")
        classes = {name or box.kind.__name__: box for name, box in boxes.items() if box.make is not None}
        if classes:
            return self._load_classes(setup, ToolEpisodes(classes, by_row=bool(section.tool_classes)))
        if prompts is None:
            require(bool(section.prompts), "data.prompts", "a .jsonl, .csv, .txt or .parquet file", section.prompts)
            prompts = prompts_of(setup.config)
        role, step = ("tool", boxes[""].step) if boxes else ("user", None)
        step = load_object(self.environment, "environment") if self.environment else step
        return TaskData(prompts, environment=TurnEnvironment(step, shows_pictures=self.pictures, role=role))

    def _load_classes(self, setup: TaskSetup, episodes: ToolEpisodes) -> TaskData:
        """Load the prompts, each followed by its object's first text, or get the prompts from the objects."""
        given, source, section = setup.prompts, "", setup.config.data
        if given is None and (section.prompts or section.tool_classes):
            expected = 'rows whose column "environment" chooses a class of data.tools'
            require(bool(section.prompts), "data.prompts", expected, section.prompts)
            given = prompts_of(setup.config)
        if given is not None:
            prompts = PromptSet(*([*map(episodes.start_episode, part)] for part in given))
        else:
            ends = [0, self.seeds, self.seeds + self.seeds // 16, self.seeds + self.seeds // 16 * 2]
            made = [[episodes.make_row(n) for n in range(*part)] for part in itertools.pairwise(ends)]
            prompts, source = make_prompt_set(*made), f"{self.seeds} of {next(iter(episodes.boxes))}"
        each = [name for name, box in episodes.boxes.items() if getattr(box.kind, "reward_each_turn", False)]
        if each and setup.config.algorithm.turn_advantage == "last":
            line = "warning: only the last turn's reward trains; for each turn's set algorithm.turn_advantage return"
            setup.info("tools", f"{line} ({', '.join(each)}.reward_each_turn)")
        step, begin = episodes.runner.step, episodes.start_episode
        environment = TurnEnvironment(step, shows_pictures=self.pictures, role="tool", start_episode=begin)
        return TaskData(prompts, episodes.rewards(), source=source, environment=environment)
