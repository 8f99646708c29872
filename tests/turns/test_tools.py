"""Python functions and TRL's environments as tools: calls are parsed, run and answered, through the command."""

import asyncio
import functools
import importlib
import itertools
import json
import math
import random
import re
from contextlib import ExitStack

import numpy as np
import pytest
from PIL import Image
from support.imports import ROOT
from support.text_task import assert_same_run, completions, episodes_of, rewound, rows, train_here, train_values
from support.tiny_models import VOCAB_SIZE, causal_lm
from transformers import AutoTokenizer

from bridges import bundled
from grpo_jax import demo, load_rewriter, predict
from grpo_jax.__main__ import main
from grpo_jax.config.named import GIVEN_TOOLS, load_object
from grpo_jax.config.run import make_config
from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError
from grpo_jax.models.hf.chat import PICTURE, observation_encoder
from grpo_jax.rollout.data import Row, messages_of
from grpo_jax.rollout.encoding import make_encode
from grpo_jax.rollout.env import Episode, Turn, as_observation
from grpo_jax.rollout.env_adapters import ToolEpisodes
from grpo_jax.rollout.pictures import size_of
from grpo_jax.rollout.prompts import make_prompt_set, read_prompt
from grpo_jax.rollout.tools import Toolbox, calls_in, toolbox
from grpo_jax.runs.evaluation import InferenceSession
from grpo_jax.runs.loading import load
from grpo_jax.tasks.task import TaskSetup
from grpo_jax.train import run

# As Qwen's: schemas in the system message, what tools said as a user's message of several responses.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}: "
    "{{ tool.function.parameters.required | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}"
    "<tool_response>{{ m.content }}</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOOLS = '''
import functools
import random


def add(a: int, b: int = 1) -> int:
    """Adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        Their sum.
    """
    return a + b


async def echo(text: str) -> str:
    """Says it again.

    Args:
        text: What is said.
    """
    if text == "leave":
        raise SystemExit("gone")
    return text


def unexplained(a: int) -> int:
    return a


def numbers(a: int):
    """Counts to a number.

    Args:
        a: The number.
    """
    yield from range(a)


@functools.lru_cache
def remembered(a: int) -> int:
    """Doubles a number.

    Args:
        a: The number.
    """
    return 2 * a


ten_more = functools.partial(add, b=10)


def total(a: int, *args: int, **kwargs: int) -> int:
    """Adds numbers.

    Args:
        a: The first number.
        args: Further numbers.
        kwargs: Further numbers.
    """
    return a + sum(args)


# The example of TRL's documentation (GRPOTrainer, Agent training, Environments).
class IncrementEnv:
    # Reserved methods
    def reset(self, **kwargs) -> str | None:  # required; called at the start of each rollout
        self.counter = 0
        self.target = random.randint(1, 6)  # self-sample the task
        return f"Increment the counter by {self.target}."  # returned string becomes the prompt

    def get_reward(self) -> float:  # optional: the environment scores itself from its own state
        return float(self.counter == self.target)

    # Public methods (exposed as tools)
    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class Countdown:
    """With rows of its own, a private method, and a reward from outside that looks at it."""

    def reset(self, start, **row):
        self.left = start
        return f" {start}."

    def take(self, n: int) -> str:
        """Takes some away.

        Args:
            n: How many.
        """
        if n > self.left:
            raise ValueError("so many are not left")
        self.left -= n
        return self._said()

    def _said(self):
        return f"{self.left} left"


class Cards:
    """Takes a card off its row's deck, and counts its rewards of each turn."""

    reward_each_turn = True
    visits = judged = 0

    def reset(self, deck, **row):
        self.deck, self.card = deck, deck.pop()
        return f" Your card is {self.card}."

    def take(self, n: int) -> str:
        """Shows the card.

        Args:
            n: Any number.
        """
        return f"{self.card} of {len(self.deck)}"

    def get_reward(self):
        self.judged += 1
        return self.judged


def visited(environments, **columns):
    for environment in environments:
        environment.visits += 1
    return [environment.visits for environment in environments]


class Sized:
    """Has to be told how large it is; none of its tools is a method of an object."""

    def __init__(self, size: int):
        self.size = size

    def reset(self, **row):
        return "go"

    @staticmethod
    def half(n: int) -> int:
        """Halves a number.

        Args:
            n: The number.
        """
        return n // 2

    @classmethod
    def name(cls) -> str:
        """Says what this is."""
        return cls.__name__

    def get_reward(self) -> float:
        return float(self.size)


three = functools.partial(Sized, 3)


def left(completions, environments, start, **columns):
    assert all(environment.left <= first for environment, first in zip(environments, start, strict=True))
    return [-environment.left for environment in environments]
'''


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def episodes_with(tool):
    return ToolEpisodes({tool.__name__: Toolbox([tool.__name__], [tool])})


WORDS = {
    "two": call("increment", step=1) + call("increment", step=2),
    "one": call("increment", step=1),
    "wrong": call("increment", by=1),
    "take": call("take", n=5),
    "add": json.dumps({"name": "add", "parameters": {"a": 2}}),
    "long": call("echo", text="a" * 400),
    "end": "It is done.",
}
SHOWN = (
    *("system\n", "user\n", "assistant\n", "<tool_response>", "</tool_response>", "add", "take", "increment", ", "),
    *('increment: ["step"]', 'add: ["a"]', 'take: ["n"]', "ment the counter by ", "Please. ", " Your card is "),
    *("error: no tool '", "', there are ", "error: step: Missing required argument; by: Unexpected keyword argument"),
    *("error: the result is too long to be read", "error: so many are not left", " left"),
)
"""Parts of prompts and observations, a token each: as few tokens for all runs, whose programs then have one shape."""
SIZE = VOCAB_SIZE + len(WORDS) + len(SHOWN)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Tools, and a policy to which whole calls are one token each."""
    home = tmp_path_factory.mktemp("tools")
    (home / "tools.py").write_text(TOOLS)
    policy = causal_lm(home / "policy", vocab_size=SIZE, num_hidden_layers=1)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_tokens([*WORDS.values(), *SHOWN])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(policy)
    rows = [{"prompt": [{"role": "user", "content": f"Go {n}."}], "start": n} for n in range(1, 13)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def values(home, tools, rewards=(), held_out=0.0):
    """All of one shape, and with the same words allowed: one run's programs are another's."""
    tokenizer = AutoTokenizer.from_pretrained(home / "policy")
    allowed = tokenizer.convert_tokens_to_ids([*WORDS.values()])
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    forbidden = sorted({*range(SIZE)} - {*allowed, *ends})
    return {
        "task": {"kind": "text", "seeds": 32},
        "report_to": [],
        "policy": {"path": str(home / "policy"), "remat": "none"},
        "data": {"tools": [f"{home}/tools.py:{name}" for name in tools], "forbidden_tokens": forbidden}
        | {"max_prompt_tokens": 64, "held_out": held_out},
        "sampling": {"turns": 2, "group_size": 4, "max_new_tokens": 1, "max_observation_tokens": 28},
        "training": {"prompts_per_batch": 4, "max_steps": 2, "save_every": 1},
        "evaluation": {"every": 1, "samples": 0, "prompts": 1, "validation_prompts": 1},
        "rewards": [{"name": f"{home}/tools.py:{name}"} for name in rewards],
    }


@pytest.fixture(scope="module")
def increments(home):
    """TRL's own example, without a data set."""
    train_values(values(home, ["IncrementEnv"], held_out=0.2), home / "increments")
    return home / "increments"


def test_the_class_of_trls_documentation_trains_as_it_is(increments):
    """Its prompts, what its tools say, and its rewards, recomputed by hand; a wrong argument is answered."""
    told, seen = {WORDS["two"]: 3, WORDS["one"]: 1}, set()
    for turns in episodes_of(increments):
        target = int(turns[0]["prompt"].removeprefix("Increment the counter by ").rstrip("."))
        counter = 0
        for row in turns:
            seen.add(row["completion"])
            steps = [1, 2] if row["completion"] == WORDS["two"] else [1] * (row["completion"] == WORDS["one"])
            replies = [str(counter := counter + step) for step in steps]
            assert math.isnan(row["reward/reward"]) or row["reward/reward"] == float(counter == target)
            assert math.isnan(row["reward/reward"]) == (row is not turns[-1])  # it is judged once, at its end
            if row is not turns[-1]:
                if row["completion"] == WORDS["wrong"]:
                    assert "by: Unexpected keyword argument" in row["observation"], row["observation"]
                elif row["completion"] in told:
                    assert row["observation"] == "\n".join(replies)
                else:
                    assert row["observation"].startswith("error: no tool")
        assert len(turns) == 2 or turns[-1]["completion"] in ("", WORDS["end"])  # an answer ends it
    assert seen >= {*told, WORDS["wrong"]}
    for step, row in enumerate(rows(increments), 1):
        answers = [line for text in completions(increments, step)["observation"] if text for line in text.split("\n")]
        assert row["tool_errors"] == sum(line.startswith("error:") for line in answers) / len(answers) > 0


def test_a_resumed_run_with_tools_equals_an_uninterrupted_run(increments, home, tmp_path):
    again = rewound(increments, tmp_path / "again", 1)
    assert train_here(home / "increments.yaml", again, "--resume") == 0
    assert_same_run(again, increments)


def test_the_demo_plays_the_class_with_typed_prompts_too(increments):
    with ExitStack() as exit_stack:
        session = InferenceSession(increments, lambda *_: None, exit_stack)
        held_out = session.ctx.test_rows[0]
        for prompt, whole in ((held_out.prompt, held_out.prompt), ("Please. ", "Please.Increment the counter by")):
            row = session.row(prompt, held_out.id)
            assert row.prompt.startswith(whole) and row.id == held_out.id
            (episode,) = session.write(row, "final")
            assert episode.last.rewards["reward"] in (0.0, 1.0)
            assert "reward" in demo.answer(session, prompt, held_out.id, ["final"])


def of_python():
    """A class and functions that nothing can import, as a session of Python has them."""
    scope = {"__name__": "<session>"}
    exec(TOOLS, scope)
    tools = [scope[name] for name in ("Countdown", "add", "echo")]
    for tool in tools:
        tool.__qualname__ = f"session.<locals>.{tool.__name__}"
    return tools


@pytest.mark.wide
def test_a_class_from_python_gets_the_rows_columns_and_rewards_get_its_objects(home, tmp_path, capsys):
    """Beside functions. A result that is too long is said to be; another process finds no such class, in one line."""
    given = values(home, [], rewards=["left"])
    given["data"] |= {"prompts": str(home / "rows.jsonl"), "tools": of_python()}
    run(make_config(given | {"run_dir": str(tmp_path / "run")}))
    said = {WORDS["add"]: "3", WORDS["long"]: "error: the result is too long to be read"}
    answers = set()
    for turns in episodes_of(tmp_path / "run"):
        left = start = int(turns[0]["prompt"].split()[-1].rstrip("."))
        assert turns[0]["prompt"] == f"Go {start}. {start}."
        for row in turns:
            answer = said.get(row["completion"])
            if row["completion"] == WORDS["take"]:
                left, answer = (left - 5, f"{left - 5} left") if left >= 5 else (left, "error: so many are not left")
            assert row["reward/left"] == -left
            if row is not turns[-1]:
                assert row["observation"] == answer or (answer is None and row["observation"].startswith("error: "))
                answers.add(answer)
    assert {*said.values(), "error: so many are not left"} <= answers
    GIVEN_TOOLS.clear()
    assert main(["evaluate", "--run", str(tmp_path / "run")]) == 2
    assert "error: data.tools: Countdown was given in Python and nothing here can import it" in capsys.readouterr().err


def test_configs_of_one_process_keep_their_own_tools(home, tmp_path):
    """All partials have one label. A new one continues a run, whatever was made before it."""
    increments = load_object(f"{home}/tools.py:IncrementEnv", "tool")

    class Sized(increments):
        def __init__(self, size):
            self.size = size

        def get_reward(self):
            return self.size

    def config(size, run_dir, **changes):
        given = values(home, [])
        given["data"]["tools"] = functools.partial(Sized, size)
        return make_config(given | {"run_dir": str(tmp_path / run_dir)} | changes)

    mine, other = config(1, "mine"), config(10, "other")
    assert run(mine)["reward"] == 1
    longer = config(1, "mine", resume=True)
    assert longer.data.tools not in (mine.data.tools, other.data.tools)
    longer = longer.replace(training=longer.training.replace(max_steps=3))
    assert run(longer)["reward"] == 1
    GIVEN_TOOLS.clear()
    with pytest.raises(UserError, match=r"partial \(object 3 of that name\) was given in Python .* script in order"):
        run(longer)


def test_the_rows_column_chooses_among_classes(home, tmp_path, capsys):
    """As in TRL: its object, its tools alone, in the prompt too, and its reward; another name is refused."""
    named = {name: f"{home}/tools.py:{path}" for name, path in (("inc", "IncrementEnv"), ("cards", "Cards"))}
    rows = [{"prompt": f"{n} ", "deck": [n], "environment": ["inc", "cards"][n % 2]} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = values(home, ["add"])
    given["data"]["prompts"] = str(tmp_path / "rows.jsonl")
    given["data"]["tools"].append(named)
    train_values(given, tmp_path / "run")
    for turns in episodes_of(tmp_path / "run"):
        counts = "Increment the counter" in turns[0]["prompt"]
        assert counts != ("Your card is" in turns[0]["prompt"])
        for row in turns:
            others = row["completion"] == (WORDS["take"] if counts else WORDS["one"])
            if row["observation"] and others:
                assert row["observation"].endswith(f"there are add, {'increment' if counts else 'take'}")
            assert math.isnan(row[f"eval_rewards/reward_{'cards' if counts else 'inc'}"])
        assert turns[-1][f"eval_rewards/reward_{'inc' if counts else 'cards'}"] == turns[-1]["reward/reward"]
        assert counts or turns[-1]["reward/reward"] == turns[-1]["turn"]
    tokenizer = AutoTokenizer.from_pretrained(home / "policy")
    encode = make_encode(tokenizer, DataSection(tools=given["data"]["tools"]), pad_id=0)
    for name, shown in (("inc", ["add", "increment"]), ("cards", ["add", "take"])):
        tokens, mask, _ = encode([Row(1, "go", {"environment": name})])
        assert [line.split(":")[0] for line in tokenizer.decode(tokens[mask]).split("\n")[1:3]] == shown
    (tmp_path / "rows.jsonl").write_text(json.dumps({**rows[0], "environment": "dice"}) + "\n")
    train_values(given, tmp_path / "refused", expected=2)
    line = "row 1: column 'environment': expected one of cards, inc, the classes in data.tools, got 'dice'"
    assert line in capsys.readouterr().err


def test_each_episode_has_its_own_row_and_object(home, tmp_path):
    """A reset that takes from a list, and rewards that change an object: no other episode or iteration sees it."""
    rows = [{"prompt": f"Go {n}.", "deck": [1, 2, 3, 4]} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = values(home, ["Cards"], rewards=["visited"])
    given["data"]["prompts"] = str(tmp_path / "rows.jsonl")
    given["rewards"].append({"name": "reward"})
    train_values(given, tmp_path / "run")
    shown = set()
    for turns in episodes_of(tmp_path / "run"):
        assert turns[0]["prompt"].endswith(". Your card is 4.")
        assert [row["reward/visited"] for row in turns] == [row["turn"] for row in turns]
        assert [row["reward/reward"] for row in turns] == [row["turn"] for row in turns]
        shown |= {row["observation"] for row in turns if row["completion"] == WORDS["take"]}
    assert shown - {None} == {"4 of 3"}
    warning = "warning: only the last turn's reward trains; for each turn's set algorithm.turn_advantage return"
    assert f"{warning} (Cards.reward_each_turn)" in (tmp_path / "run" / "train.log").read_text()


def test_a_column_with_a_name_that_tools_use_is_refused(home, tmp_path, capsys):
    given = values(home, ["Countdown"], rewards=["left"])
    given["data"]["prompts"] = str(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Count.", "start": 1, "environment": "mine"}) + "\n")
    train_values(given, tmp_path / "run", expected=2)
    assert "row 1: column 'environment' is a name that tools use: rename it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [("add", {"a": 1})]),
        (
            '<think>{"name"</think>So <tool_call>{"name":"a"}</tool_call>, <tool_call>{"name":"b","arguments":"{}"}',
            [("a", {}), ("b", {})],
        ),
        ('{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ('<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": null}', [("a", {}), ("b", {})]),
        ("It is 3.", []),
        ('So.</think>Hm. <think>Perhaps <tool_call>{"name": "a"}</tool_call>', []),
        ('{"name": "Bob"}', []),
        ('{"name": "add", "para', ["a call must be JSON"]),
        ("<tool_call>add(1, 2)</tool_call>", ["a call must be JSON"]),
        ('<tool_call>["add"]</tool_call>', ['expected {"name": …']),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', ["arguments must be an object"]),
        ("<tool_call>" + "[" * 100_000, ["a call must be JSON"]),
    ],
)
def test_calls_of_both_forms(text, found):
    calls = calls_in(text)
    assert len(calls) == len(found)
    for call_, expected in zip(calls, found, strict=True):
        if isinstance(expected, str):
            assert call_.problem.startswith(expected)
        else:
            assert (call_.name, call_.arguments, call_.problem) == (*expected, "")


def test_a_tool_given_in_python_keeps_the_module_of_its_script(tmp_path, monkeypatch):
    """A second import of its file would have other globals, and other classes for `isinstance` in a reward."""
    (tmp_path / "corner_shop.py").write_text("""
STOCK = {}

def stock(fruit: str) -> int:
    \"\"\"
    Counts a fruit.

    Args:
        fruit: Its name.
    \"\"\"
    return STOCK.get(fruit, 0)
""")
    monkeypatch.syspath_prepend(tmp_path)
    shop = importlib.import_module("corner_shop")
    shop.STOCK["plum"] = 3
    names = make_config(task="text", data={"tools": [shop.stock]}, sampling={"turns": 2}).data.tool_names
    assert names == (f"{tmp_path}/corner_shop.py:stock",)
    assert asyncio.run(toolbox(names).call(call("stock", fruit="plum"))).text == "3"
    GIVEN_TOOLS.clear()  # as in another process
    assert asyncio.run(toolbox(names).call(call("stock", fruit="plum"))).text == "0"


def test_every_call_has_an_answer(home):
    tools = toolbox([f"{home}/tools.py:{name}" for name in ("add", "echo")])
    answers = {
        call("add", a=1, b=2): "3",
        call("add", a="4"): "5",
        call("add", a=1.5): "error: a: Input should be a valid integer",
        call("add", b=2): "error: a: Missing required argument",
        call("add", a=1, c=2): "error: c: Unexpected keyword argument",
        call("subtract", a=1): "error: no tool 'subtract', there are add, echo",
        call("echo", text="leave"): "error: gone",
        call("echo", text="\0\ud800"): "\ufffd?",
        call("add", a=1) + call("echo", text="b"): "2\nb",
    }
    for text, expected in answers.items():
        said = asyncio.run(tools.call(text)).text
        assert said.startswith(expected) if expected.startswith("error") else said == expected, said
    assert asyncio.run(tools.call("It is 3.")) is None
    episodes = [Episode((Turn(text),)) for text in (call("add", a=1), "2")]
    replies = tools.step([Row(1, "a")] * 2, episodes)
    assert replies[0].messages == ("2",) and replies[1] is None


def test_a_tool_may_return_content_parts_with_pictures():
    """As in TRL; a list of other values is text. The option that loads the vision tower holds for tools too."""

    def look() -> list:
        """Looks."""
        return [{"type": "text", "text": "See "}, {"type": "image", "image": Image.new("RGB", (2, 3))}]

    def count() -> list:
        """Counts."""
        return [{"type": "circle"}]

    seen = asyncio.run(Toolbox(["a", "b"], [look, count]).call(call("look") + call("count")))
    assert seen.messages == ("See ", "[{'type': 'circle'}]") and [size_of(one) for one in seen.pictures] == [(3, 2)]
    assert as_observation(seen).pictures

    frame = np.zeros((2, 3, 3), np.uint8)

    def brighter() -> list:
        """Draws into one array."""
        frame[:] += 1
        return [{"type": "image", "image": frame}]

    drawn = asyncio.run(Toolbox(["c"], [brighter]).call(call("brighter") * 2))
    assert [int(one.max()) for one in drawn.pictures] == [1, 2]

    for tools in ([look], [Waiting]):
        config = make_config(
            task={"kind": "text", "pictures": True}, data={"tools": tools, "prompts": "x"}, sampling={"turns": 2}
        )
        setup = TaskSetup(config, make_prompt_set([{"prompt": "a", "number": 1}]), lambda *_: None)
        assert config.task.load(setup).environment.shows_pictures


def test_functions_of_all_kinds_are_tools(home):
    """Static and class methods, partial and cached functions; what no call by name can give is not offered."""
    tools = toolbox([f"{home}/tools.py:{name}" for name in ("remembered", "ten_more", "total", "three")])
    offered = {one["function"]["name"]: one["function"]["parameters"].get("required", []) for one in tools.schemas}
    assert offered == {"remembered": ["a"], "add": ["a"], "total": ["a"], "half": ["n"], "name": []}
    shown = [{*one["function"]["parameters"]["properties"]} for one in tools.schemas]
    assert not {"args", "kwargs", "b"} & set.union(*shown)
    episode = tools.make()
    calls = {
        call("remembered", a=3): "6",
        call("add", a=1): "11",
        call("total", a=3): "3",
        call("half", n=9): "4",
        call("name"): "Sized",
    }
    assert {text: asyncio.run(tools.call(text, episode)).text for text in calls} == calls


def test_the_policy_reads_the_schemas_and_replies_as_the_template_has_them(home):
    tools = toolbox([f"{home}/tools.py:{name}" for name in ("add", "IncrementEnv")])
    assert [schema["function"]["name"] for schema in tools.schemas] == ["add", "increment"]
    assert tools.schemas[1]["function"]["parameters"]["required"] == ["step"]
    tokenizer = AutoTokenizer.from_pretrained(home / "policy")
    encode = observation_encoder(tokenizer, [tokenizer.eos_token_id], role="tool")
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}]
    replies = [{"role": "tool", "content": text} for text in ("3", "five")]
    whole = tokenizer.apply_chat_template(turns + replies, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(encode(("3", "five"), ended=False)) == whole.partition("yes")[2]
    ends = [encode(("3", text), ended=True).count(tokenizer.eos_token_id) for text in ("five", "<|im_end|>")]
    assert ends[0] == ends[1] == 1  # the message's own
    section = DataSection(tools=f"{home}/tools.py:add")
    encoded = make_encode(tokenizer, section, pad_id=0, rows=[Row(1, "go")])([Row(1, "go")])
    shown = tokenizer.apply_chat_template(
        turns[:1], tokenize=False, add_generation_prompt=True, tools=tools.schemas[:1]
    )
    assert tokenizer.decode(encoded.tokens[encoded.mask]) == shown


def test_random_numbers_of_a_reset_are_the_seeds(home):
    tools = toolbox([f"{home}/tools.py:IncrementEnv"])
    episodes = ToolEpisodes({"IncrementEnv": tools})
    state = random.getstate()
    shown = [episodes.make_row(seed)["prompt"] for seed in (*range(20), *range(20))]
    assert shown[:20] == shown[20:] and len({*shown}) == 6
    assert random.getstate() == state


class Drawn:
    """Draws a number that its prompt does not show."""

    def __init__(self):
        self.number = random.random()

    def reset(self, **row):
        return "go"


def test_random_numbers_of_an_object_are_the_seeds():
    """A group compares completions of one task, although no prompt shows that tasks differ."""
    tools = episodes_with(Drawn)

    def number(seed):
        episode = tools.runner._makers["Drawn"]()
        asyncio.run(episode.reset(seed))
        return episode.object.number

    assert number(1) == number(1) != number(2)


class Waiting:
    """Shows its row, which it has after a wait."""

    async def reset(self, number, **row):
        await asyncio.sleep(0)
        return [{"type": "text", "text": f"{number} "}, {"type": "text", "text": "again"}]

    def look(self) -> str:
        """Looks."""
        return ""


def test_a_reset_may_be_async_and_return_content_parts():
    episodes = episodes_with(Waiting)
    row = episodes.start_episode(Row(7, "Go ", {"number": 3}))
    assert row.prompt == "Go 3 again"
    again = [Episode((Turn("It is done."),)) for _ in range(3)]
    assert episodes.runner.step([row] * 3, again) == [None] * 3  # each began with the text of its prompt


class Pile:
    """Ends by itself, by an attribute that the object alone has, and counts its open objects."""

    open = []

    def reset(self, seed: int, **row) -> str:
        self.done = False
        self.open.append(self)
        self.left = seed
        return f"{seed} left"

    def take(self) -> int:
        """Takes one."""
        self.left -= 1
        self.done = self.left == 0
        return self.left

    async def get_reward(self) -> float:
        assert self in self.open
        return float(self.done)

    async def __aexit__(self, *error) -> None:
        self.open.remove(self)


def test_tools_named_done_and_close_end_no_episode():
    class Door:
        """Has tools of such names."""

        def reset(self, **row) -> None:
            pass

        def done(self) -> str:
            """Says so."""
            return "not yet"

        def close(self) -> str:
            """Closes the door."""
            return "closed"

    episodes = episodes_with(Door)
    row, memory = episodes.start_episode(Row(0, "go")), {}
    (seen,) = episodes.runner.step([row], [Episode((Turn(call("close")),), False, memory=memory)])
    assert seen.text == "closed"
    (seen,) = episodes.runner.step([row], [Episode((Turn(call("close")), Turn(call("done"))), False, memory=memory)])
    assert seen.text == "not yet" and not seen.done


def test_a_class_may_end_its_episode_take_the_seed_and_be_closed():
    episodes = episodes_with(Pile)
    (box,) = episodes.boxes.values()
    assert [schema["function"]["name"] for schema in box.schemas] == ["take"]
    row = episodes.start_episode(Row(2, "Take all: "))
    assert row.prompt == "Take all: 2 left" and not Pile.open
    assert episodes.start_episode(Row(3, "", {"seed": 7})).prompt == "7 left"

    def play(*texts, final=False):
        memory, columns = {}, {name: [value] for name, value in row.columns.items()}
        for number in range(1, len(texts) + 1):
            turns = tuple(map(Turn, texts[:number]))
            episode = Episode(turns, final and number == len(texts), memory=memory)
            (seen,) = episodes.runner.step([row], [episode])
        return seen, episodes.runner.reward(**columns, episodes=[episode])[0]

    assert play(call("take"), call("take")) == (None, 1.0) and not Pile.open
    assert play(call("take"), "I give up") == (None, 0.0) and not Pile.open
    seen, reward = play(call("take"), final=True)
    assert seen.text == "1" and reward == 0.0 and not Pile.open
    seen, reward = play(call("take"))
    assert seen.text == "1" and reward is None and len(Pile.open) == 1
    Pile.open.clear()


@pytest.mark.parametrize("chat", [False, True])
def test_a_reset_shows_pictures_behind_the_rows_own(chat):
    class Shows(Waiting):
        def reset(self, **row):
            return [{"type": "text", "text": "Now "}, {"type": "image", "image": np.zeros((2, 2, 3), np.uint8)}]

    first, text = Image.new("RGB", (1, 1)), "Look."
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}] if chat else text
    row = episodes_with(Shows).start_episode(read_prompt(prompt, [first], None))
    assert [size_of(picture) for picture in row.pictures] == [(1, 1), (2, 2)]
    (message,) = messages_of(row)
    assert message.parts == (PICTURE, text, "Now ", PICTURE) or message.parts == (PICTURE, text + "Now ", PICTURE)


def test_an_empty_conversation_is_the_text_of_its_reset():
    """TRL's data sets for environments often have an empty user message, which `reset` fills."""

    class Begins(Waiting):
        def reset(self, **row):
            return "Count."

    row = episodes_with(Begins).start_episode(read_prompt([{"role": "user", "content": ""}], [], None))
    assert row.prompt == "Count." and [message.text for message in messages_of(row)] == ["Count."]


@pytest.mark.parametrize("frame", [np.zeros((1, 1, 3), np.uint8), Image.new("RGB", (1, 1))])
def test_prompts_keep_the_pictures_that_a_class_draws_into_one_buffer(frame):
    class Draws(Waiting):
        def reset(self, seed: int, **row):
            if isinstance(frame, Image.Image):
                frame.putpixel((0, 0), (seed, seed, seed))
            else:
                frame.fill(seed)
            return [{"type": "image", "image": frame}]

    rows = [episodes_with(Draws).start_episode(Row(seed, "Look.")) for seed in (1, 2)]
    assert [np.asarray(row.pictures[0]).max() for row in rows] == [1, 2]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"text": "go"}, "must return a text, a list of content parts, or None: got {'text': 'go'}"),
        ([{"type": "audio"}], 'must return a text, a list of content parts, or None: a part must be of type "text"'),
        ([{"type": "image"}], 'a part of type "image" needs its picture'),
        (None, "returned no text for a prompt: let it return one, or name a file of prompts in data.prompts"),
        ("  ", "returned no text for a prompt: let it return one"),
    ],
)
def test_a_bad_result_of_reset_names_its_class(home, tmp_path, capsys, returned, message):
    class Says(Waiting):
        def reset(self, **row):
            return returned

    given = values(home, [])
    given["data"]["tools"] = [Says]
    with pytest.raises(UserError) as error:
        run(make_config(given | {"run_dir": str(tmp_path / "run")}))
    told = str(error.value)
    assert told.startswith("data.tools: Says.reset ") and message in told


def test_an_episode_that_begins_with_another_text_than_its_prompt_fails():
    numbers = itertools.count()

    class Counts(Waiting):
        def reset(self, **row):
            return f"Go {next(numbers)}."

    episodes = episodes_with(Counts)
    row = episodes.start_episode(Row(1, ""))
    (failure,) = episodes.runner.step([row], [Episode((Turn("It is done."),))])
    assert "reset of Counts returned 'Go 0.' for the prompt and 'Go 1.' for an episode of it" in str(failure)

    class Shows(Waiting):
        limit = 1

        def reset(self, **row):
            image = np.full((2, 2, 3), next(numbers), np.uint8)  # pictures may differ, as their files' names do
            return [{"type": "text", "text": row["prompt"]}, {"type": "image", "image": image}, f" {self.limit}."]

    episodes = episodes_with(Shows)
    row = episodes.start_episode(Row(1, "Go"))
    assert episodes.runner.step([row], [Episode((Turn("It is done."),))]) == [None]
    Shows.limit = 2
    (failure,) = episodes.runner.step([row], [Episode((Turn("It is done."),))])
    assert "reset of Shows returned 'Go 1.' for the prompt and 'Go 2.' for an episode of it" in str(failure)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (["unexplained"], "tools.py:unexplained: Cannot generate JSON schema for unexplained"),
        (["numbers"], "tools.py:numbers: it yields; let it return its result, which the policy reads as text"),
        (["nothing"], "has no nothing"),
        (["IncrementEnv", "Countdown"], "data.tools: expected functions, and one class at most"),
        (["add", "add"], "data.tools: expected different names, got add twice"),
        (["Sized"], "tools.py:Sized is made without arguments, which raised TypeError: Sized.__init__() missing 1"),
    ],
)
def test_a_bad_tool_is_one_line(home, tmp_path, capsys, tools, message):
    train_values(values(home, tools), tmp_path / "run", expected=2)
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.fixture
def two_tools(home):
    """The class of docs/turns.md for the bundled policy, which needs no download."""
    (counter,) = re.findall(r"```python\n(class Counter.*?)```", (ROOT / "docs" / "turns.md").read_text(), re.DOTALL)
    (home / "two_tools.py").write_text(counter)
    return {
        "task": {"kind": "text", "seeds": 16},
        "report_to": [],
        "policy": {"path": "miniature", "remat": "none"},
        "data": {"tools": [f"{home}/two_tools.py:Counter"], "held_out": 0},
        "sampling": {"turns": 2, "group_size": 2, "max_new_tokens": 4, "max_observation_tokens": 32},
        "training": {"prompts_per_batch": 2, "max_steps": 1, "save_every": 0},
        "evaluation": {"every": 0, "samples": 0},
    }


@pytest.mark.slow
@pytest.mark.wide  # the class of TRL's documentation trains above, and `load` below takes this one
def test_the_bundled_policy_plays_a_class_with_two_tools(two_tools, tmp_path):
    train_values(two_tools, tmp_path / "run")
    assert {row["prompt"] for turns in episodes_of(tmp_path / "run") for row in turns} == {"count to 3"}


def test_the_bundled_policy_reads_a_class_with_two_tools(two_tools, home):
    """Its prompts and answers have room; a prompt without tools is the same as ever."""
    ctx = load(make_config(two_tools), lambda *_: None)
    rows = ctx.task_data.prompts.train[:2]
    assert {row.prompt for row in rows} == {"count to 3"}
    tokens, mask, _ = ctx.fns.encode(rows)
    assert ctx.policy.tokenizer.decode(tokens[0][mask[0]]).startswith("<|user|> add(step) clear()<|user|> count")
    (answer,) = ctx.fns.env.step(rows[:1], [Episode((Turn(call("add", step=1)),))])
    assert ctx.fns.env.encode_observation(answer, True, ()) and answer.text == "1"
    tokenizer = AutoTokenizer.from_pretrained(bundled("miniature", "policy"))
    schemas = toolbox((f"{home}/two_tools.py:Counter",)).schemas
    prompt = functools.partial(tokenizer.apply_chat_template, [{"role": "user", "content": "hm"}], tokenize=False)
    assert prompt() == "<|user|> hm" and prompt(tools=schemas) == "<|user|> add(step) clear()<|user|> hm"


def test_predict_plays_all_turns(increments, home, monkeypatch, capsys):
    """The environment is stepped until it judges the episode, and the last turn is printed."""
    judged = []
    environment = load_object(f"{home}/tools.py:IncrementEnv", "tool")
    monkeypatch.setattr(environment, "get_reward", lambda self: judged.append(self.counter) or 0.0)
    with ExitStack() as exit_stack:
        session = InferenceSession(increments, lambda *_: None, exit_stack)
        prompt = session.ctx.test_rows[0].prompt
        (episode,) = session.write(session.row(prompt, 1), "final")
    assert predict.main(["--run", str(increments), "--prompt", prompt, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prompt": prompt, "completion": episode.last.completion}
    rewrite = load_rewriter(increments)
    assert rewrite(prompt) == episode.last.completion and judged == [judged[0]] * 3
    with pytest.raises(UserError, match="a run of several turns, or one that draws, takes prompts of text alone"):
        rewrite(prompt, ["a.png"])
