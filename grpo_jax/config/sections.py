"""Sections of the config that all tasks of language share. Help lines stand in the classes' docstrings.

The policy and the algorithm have modules of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, Lt

from grpo_jax.config.fields import (
    COEFFICIENT,
    LENGTH,
    Coefficient,
    Count,
    Length,
    NonNegative,
    Positive,
    PositiveCount,
    check_ranges,
    may_change,
    require,
)

MOST_TURNS = 64
_TEMPLATE_ARGUMENTS = (
    *("tools", "enable_thinking", "conversation", "messages", "chat_template", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Arguments of `apply_chat_template` that are not for the template, and what has a field of its own."""


@dataclass(frozen=True)
class DataSection:
    """Prompts.

    Args:
        prompts: A .jsonl, .csv, .tsv, .txt or .parquet file, or the folder of a saved Hugging Face data set;
            "hub:OWNER/NAME", perhaps with :CONFIG or :CONFIG:SPLIT, for one of the hub; "builtin", "builtin:plain",
            "builtin:attributes" or "builtin:crowded" for the prompts that ship with the package; or a name that the
            task knows.
        validation: The like for choosing the best checkpoint, where it is a file of its own; with it or `test` all of
            `prompts` is trained on.
        test: The like for what is measured before and after.
        columns: What the data calls otherwise, {name: the data's name for it}, such as {"prompt": "question"}.
        held_out: Share of a file's prompts kept apart for testing (and as many for validation) if it has no
            "split" column; 0 trains on all of them, and nothing is measured before and after.
        form: "rewrite" asks the policy for a new prompt; "append" lets it continue the user's.
        instruction: What a chat policy is told in the rewrite form; {prompt} stands for the user's prompt.
            Empty: the chat template alone.
        system_prompt: What a chat policy is told before each prompt; a conversation that begins with a system message
            keeps its own. Empty: what the chat template says by itself.
        enable_thinking: Let a policy think first whose chat template can switch that off.
        tools: What the chat template says the policy may call: a list of JSON schemas, or the name of the column that
            has each row's, as a list or as JSON text.
        chat_template_options: What the chat template is told beside that, by the names it has for it.
        max_prompt_tokens: Longest prompt in policy tokens, instruction and pictures included; a longer one is an error.
        picture_size: Pixels along both sides that every picture of a prompt is brought to; null for 448 (512 for
            Qwen3-VL), within what the policy's folder allows; 0 keeps each one's shape, as its processor does.
        allowed_tokens: What may be sampled: "all" tokens; "ascii", those of printable ASCII characters alone;
            "english", those of ASCII letters, digits, spaces and . , ; : ! ? ' " ( ) - alone. End tokens always may.
        forbidden_tokens: Tokens that do not exist for sampler, update and reference, each by its id or as a text that
            is one token.
    """

    prompts: str = ""
    validation: str = ""
    test: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    held_out: Annotated[NonNegative, Lt(0.5)] = 0.2
    form: Literal["rewrite", "append"] = "rewrite"
    instruction: str = ""
    system_prompt: str = ""
    enable_thinking: bool = False
    tools: list[dict[str, Any]] | str = field(default_factory=list)
    chat_template_options: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: Length = 256
    picture_size: Annotated[int, Ge(0), Le(LENGTH)] | None = None
    allowed_tokens: Literal["all", "ascii", "english"] = "all"
    forbidden_tokens: list[int | str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_ranges(self, "data")
        for name in ("system_prompt", "tools", "chat_template_options"):
            value = getattr(self, name)
            chat = self.form != "append" or not value
            require(chat, f"data.{name}", "nothing with form 'append', which has no chat", value)
        reserved = [name for name in self.chat_template_options if name in _TEMPLATE_ARGUMENTS]
        expected = "what the template itself knows (data.tools and data.enable_thinking apart)"
        require(not reserved, "data.chat_template_options", expected, reserved)

    @property
    def template_options(self) -> dict[str, Any]:
        """Options of the chat template, the same for all rows."""
        tools = {"tools": self.tools} if self.tools and not isinstance(self.tools, str) else {}
        return {"enable_thinking": self.enable_thinking, **self.chat_template_options, **tools}


@dataclass(frozen=True)
class SamplingSection:
    """How completions are drawn.

    Args:
        group_size: Completions per prompt (G).
        group: How a group is made where a task lists what may be written: independent "samples", "distinct" ones (drawn
            without replacement), or the "beams", which are the likeliest; these two know temperature alone.
        keep_prompt: How many of them are the unchanged prompt instead: their rewards count in the group, and nothing is
            trained on them. For tasks in which the prompt itself can be judged, such as its rewriting.
        max_new_tokens: Longest completion (T); of an episode the longest text of one turn.
        temperature: Softmax temperature of the trained distribution.
        top_k: Draw among the k likeliest tokens; 0 for all.
        top_p: Draw within the smallest set of this probability; 1 for all.
        min_p: Drop tokens below this share of the likeliest token's probability; 0 for none.
        min_new_tokens: Shortest completion: no end token is drawn before; a stop string may end it all the same.
        repetition_penalty: Divide the positive logits, and multiply the negative ones, of tokens that the prompt or
            the completion holds already, by this, when drawing; 1 for none.
        stop: Texts that end a completion, of an episode a turn, as an end token does. The tokens up to and including
            the one that completes such a text are kept and trained.
        turns: How often the policy writes in an episode, at most: above 1 what the task answers stands between.
        max_answer_tokens: Most tokens that stand between two turns, the chat template's marks and the places of
            pictures among them; a longer answer is refused as a failed judge is.
    """

    group_size: Length = 8
    group: Literal["samples", "distinct", "beams"] = "samples"
    keep_prompt: Annotated[int, Ge(0)] = 0
    max_new_tokens: Length = 32
    temperature: Positive = 1.0
    top_k: Count = 0
    top_p: Annotated[Positive, Le(1)] = 1.0
    min_p: Annotated[NonNegative, Lt(1)] = 0.0
    min_new_tokens: Annotated[int, Ge(0)] = 0
    repetition_penalty: Positive = 1.0
    stop: list[str] = field(default_factory=list)
    turns: Annotated[int, Ge(1), Le(MOST_TURNS)] = 1
    max_answer_tokens: Length = 64

    def __post_init__(self) -> None:
        check_ranges(self, "sampling")
        expected = f"a number in [0, group_size - 1 = {self.group_size - 1}], for something must be written"
        require(self.keep_prompt < self.group_size, "sampling.keep_prompt", expected, self.keep_prompt)
        one_turn = self.keep_prompt == 0 or self.turns == 1
        expected = "0 with sampling.turns above 1: a prompt is not written in turns"
        require(one_turn, "sampling.keep_prompt", expected, self.keep_prompt)
        expected = f"a number in [0, max_new_tokens = {self.max_new_tokens}]"
        require(self.min_new_tokens <= self.max_new_tokens, "sampling.min_new_tokens", expected, self.min_new_tokens)
        require(all(self.stop), "sampling.stop", "texts that are not empty", self.stop)
        for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0), ("repetition_penalty", 1)):
            value = getattr(self, name)
            expected = f"{off}: sampling.group {self.group} knows temperature alone"
            require(self.group == "samples" or value == off, f"sampling.{name}", expected, value)

    @property
    def written_completions(self) -> int:
        """Completions of a prompt that the policy writes."""
        return self.group_size - self.keep_prompt

    @property
    def written_tokens(self) -> int:
        """Most tokens that the policy writes for one completion, all turns together."""
        return self.turns * self.max_new_tokens

    @property
    def stream_tokens(self) -> int:
        """Most tokens behind a prompt: what the policy writes, and what is answered between its turns."""
        return self.written_tokens + (self.turns - 1) * self.max_answer_tokens


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW and its schedule.

    Args:
        learning_rate: Peak learning rate; null takes one that is safe for a pretrained policy: 1e-6 where all weights
            are trained, 1e-4 where adapters are (policy.lora).
        schedule: Learning-rate schedule after the warm-up.
        warmup_steps: Updates of linear warm-up.
        weight_decay: Decoupled weight decay of projections and adapters; norms, biases, embeddings, the unembedding and
            the value head do not decay.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        max_grad_norm: Gradients are scaled down to this global norm; 0 for never.
    """

    learning_rate: Positive | None = None
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    weight_decay: Coefficient = 0.0
    beta1: Annotated[NonNegative, Lt(1)] = 0.9
    beta2: Annotated[NonNegative, Lt(1)] = 0.99
    max_grad_norm: NonNegative = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, "optimizer")


@dataclass(frozen=True)
class TrainingSection:
    """The loop.

    Args:
        prompts_per_batch: Prompts of one iteration (P).
        max_steps: Iterations in all; 0 leaves it to num_epochs.
        num_epochs: Passes over the training prompts when max_steps is 0.
        inner_epochs: Passes over one sampled batch.
        minibatches: Optimizer updates per pass.
        accumulation: Micro-batches per update, to save memory; the gradient stays the same.
        memory_budget_gib: Memory that an update may take beside weights and optimizer state; `accumulation` is raised
            until it does. 0 leaves it as given.
        chunk_prompts: Prompts that travel together through sampling, rendering and scoring; 0 for all.
        lag: 1 samples the next batch while this one is judged and learned from, with the weights before that update
            (docs/scaling.md); 0 samples each with the newest.
        save_every: Iterations between checkpoints; 0 for the end only.
        keep_checkpoints: Checkpoints kept beside best and final.
        keep_gib: What all checkpoints may take on the disk together; beyond it the oldest go, never best, final and the
            newest. While one is written there is one more. 0 for no bound.
        max_hours: Hours after which this process saves and stops behind an iteration, for --resume to go on; 0 for
            never.
        early_stopping_patience: End training after so many validations in a row without a better one; 0 for never.
        early_stopping_threshold: What is better exceeds the best validation so far by more than this.
        early_stopping_metric: Of a validation, what must get better: "score", which is maximised, or the name of a
            reward or of a watched measure.
    """

    prompts_per_batch: Length = 12
    max_steps: Count = may_change(100)
    num_epochs: PositiveCount = may_change(1)
    inner_epochs: PositiveCount = 1
    minibatches: PositiveCount = 1
    accumulation: PositiveCount = may_change(1)
    memory_budget_gib: NonNegative = may_change(0.0)
    chunk_prompts: Annotated[int, Ge(0), Le(LENGTH)] = may_change(0)
    lag: Annotated[int, Ge(0), Le(1)] = 0
    save_every: Count = may_change(25)
    keep_checkpoints: PositiveCount = may_change(2)
    keep_gib: NonNegative = may_change(0.0)
    max_hours: NonNegative = may_change(0.0)
    early_stopping_patience: Count = may_change(0)
    early_stopping_threshold: NonNegative = 0.0
    early_stopping_metric: str = "score"

    def __post_init__(self) -> None:
        """Check the ranges and that batches divide."""
        check_ranges(self, "training")
        parts = self.minibatches * self.accumulation
        expected = f"a multiple of minibatches x accumulation = {parts}"
        require(self.prompts_per_batch % parts == 0, "training.prompts_per_batch", expected, self.prompts_per_batch)


@dataclass(frozen=True)
class RewardSection:
    """One reward: an objective of its own, never summed before the advantages.

    Args:
        name: One that the task has (an unknown one is answered with their list), perhaps as name@judge for another
            judge than the task's own; or package.module:function or file.py:function.
        weight: Its weight among the objectives.
        condition_on: Count this reward only where the named one (by its label; of an import path, the function) reaches
            the threshold. Left out: as the task has it, mostly always. "none": always.
        threshold: The threshold of a condition_on that names a reward.
        options: Keyword arguments of the reward.
        isolated: Call a reward of an import path in a process of its own: one that crashes, hangs beyond judge_timeout
            or takes all memory ends that process alone, and the next call gets a new one.
        messages: Give it prompts and completions as chat messages, as TRL does where the data are conversations; of an
            import path alone.
        label: What metrics and condition_on call it, for several of one function; empty for its name, of an import
            path the function alone.
    """

    shorthand: ClassVar[str] = "name"  # the field that a text alone sets

    name: str
    weight: Annotated[float, Ge(-COEFFICIENT), Le(COEFFICIENT)] = 1.0
    condition_on: str | None = None
    threshold: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    isolated: bool = may_change(False)
    messages: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        require(bool(self.name), "rewards.name", "a name", self.name)
        check_ranges(self, f"rewards.{self.called}")
        require(math.isfinite(self.threshold), f"rewards.{self.called}.threshold", "a finite number", self.threshold)

    @property
    def called(self) -> str:
        """Its name in metrics."""
        return self.label or self.name.rpartition(":")[2]


@dataclass(frozen=True)
class EvaluationSection:
    """Held-out measurement.

    Args:
        prompts: Test prompts measured before and after; 0 for all of them.
        validation_prompts: Validation prompts on which the best checkpoint is chosen.
        every: Iterations between validations; 0 for never.
        gallery: Prompts shown in the before/after gallery.
        sampled: Measure sampled completions beside the greedy ones.
        samples: Sampled completions of each test prompt (k); above 1 their mean@k and pass@k are told, with 95 %
            intervals.
        temperature: Of the sampled completions; null for that of training.
        top_k: Likewise; null for that of training.
        top_p: Likewise; null for that of training.
        pass_threshold: What a reward or watched measure must reach for a completion to pass.
    """

    prompts: Count = 128
    validation_prompts: Count = 32
    every: Count = 25
    gallery: Count = may_change(12)
    sampled: bool = True
    samples: Length = 1
    temperature: Positive | None = None
    top_k: Count | None = None
    top_p: Annotated[Positive, Le(1)] | None = None
    pass_threshold: float = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, "evaluation")
        drawn = self.samples == 1 or self.sampled
        require(drawn, "evaluation.samples", "1 with evaluation.sampled false", self.samples)
        for name in ("temperature", "top_k", "top_p"):
            value = getattr(self, name)
            require(value is None or self.sampled, f"evaluation.{name}", "null with evaluation.sampled false", value)


@dataclass(frozen=True)
class WarmStartSection:
    """Supervised steps before the first iteration, by the same trainer; "before" is measured after them.

    Args:
        steps: Supervised updates; 0 for none. What is taught, the task says.
        batch: Pairs of one update.
        learning_rate: Peak learning rate, after a tenth of the steps as a warm-up; it falls to 0 along a cosine.
        group_by_length: Make batches of prompts of like length, which need less padding: faster where lengths differ.
    """

    steps: Count = 0
    batch: Length = 64
    learning_rate: Positive = 1e-3
    group_by_length: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, "warm_start")
