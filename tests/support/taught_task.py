"""A user's task with SFT pairs, also for configs that name a task by its file."""

from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.prompts import make_prompt_set
from grpo_jax.rollout.reward_registry import TaskRewards
from grpo_jax.tasks.task import Task, TaskData, TaskSetup

PROMPT = "linen lamp"


def brevity(completions):
    return [-float(len(text)) for text in completions]


class Taught(Task):
    """What to answer to "linen lamp" is taught; what is rewarded is to be brief."""

    texts: list[str]
    """The answers."""

    def load(self, setup: TaskSetup) -> TaskData:
        train, validation, test = ["wool rug", "oak desk", PROMPT, "tin cup"], ["red mat"], ["blue mat"]
        return TaskData(
            make_prompt_set(*([{"prompt": prompt} for prompt in part] for part in (train, validation, test))),
            rewards=TaskRewards({"brevity": brevity}, defaults=[RewardSection(name="brevity")]),
            pairs=lambda: [(PROMPT, text) for text in self.texts],
        )
