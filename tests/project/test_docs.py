"""Names in README and docs: command lines parse, fields and files exist, imports resolve."""

import importlib
import itertools
import re
import shlex
from typing import get_args

import pytest
import yaml
from support import import_checks
from support.imports import ROOT

from grpo_jax import demo, evaluate, export, predict, recommend
from grpo_jax.cartpole import __main__ as cartpole
from grpo_jax.config.command_line import parse
from grpo_jax.config.run import JUDGES, TASKS, Config, make_config
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError, read_options
from grpo_jax.planning import take_request

FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
OTHERS = {command.__name__: command for command in (demo, evaluate, export, predict, recommend)}
TASK_NAMES = [*TASKS.kinds]
TASK_CLASSES = [TASKS.class_of(name) for name in TASK_NAMES]
JUDGE_CLASSES = [JUDGES.class_of(name) for name in JUDGES.kinds]
SECTIONS = {*Config.model_fields}
SHIPPED = (
    *("prompt_enhancement_miniature", "prompt_refinement_miniature"),
    *("prompt_enhancement_sdxl_turbo", "prompt_enhancement_flux_schnell"),
    "recommendation_quick",
)
FOLDERS = "|".join(("grpo_jax", "bridges", "configs", "tests", "benchmarks", "docs", "examples", "scripts"))
SUFFIX = re.compile(r"\.(py|md|json|jsonl|yaml|txt|tsv|csv|log|html)$")

each_page = pytest.mark.parametrize("page", PAGES)


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks in some languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Return the texts between backticks, each in one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Calls of a command: its module, and its words without comments, ellipses and what stands for any field."""
    indented = re.findall(r"^ {4,}(.*)$", prose(text).replace("\\\n", " "), re.MULTILINE)
    shell = [line for block in blocks(text, "bash", "") for line in block.replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"\s#.*|\[.*…]|…", "", line) for line in (*indented, *shell, *spans(text))]
    calls = [re.search(r"-m (grpo_jax(?:\.\w+)+)(.*)", line) for line in lines]
    names = "train|cartpole|evaluate|export|predict|recommend|demo"
    short = [re.match(rf"(?:python -m grpo_jax|grpo) ({names}) (-.*|\w+/.*)", line) for line in lines]
    found = [(call[1], call[2]) for call in calls if call] + [
        (f"grpo_jax.{call[1]}", call[2]) for call in short if call
    ]
    return [(module, shlex.split(rest)) for module, rest in found]


def dotted_names(text: str) -> set[str]:
    """Names such as `training.grad_accumulation_steps` at the beginning of a span, and all `--section.field`."""
    name = r"[a-z]\w*(?:\[])?(?:\.(?:[a-zA-Z_]\w*|\*))+"
    found = [re.match(name, span) for span in spans(text)]
    flags = [flag for span in spans(text) for flag in re.findall(rf"--({name})", span)]
    return {match[0] for match in found if match and not SUFFIX.search(match[0])} | set(flags)


def is_field(name: str) -> bool:
    """Whether a dotted name is a field of the config; NAME stands for any judge."""
    first, *rest = name.replace("[]", "").split(".")
    given = {"task": TASK_CLASSES, "judges": JUDGE_CLASSES, "rewards": [RewardSection]}
    kinds = given.get(first) or types_of([Config], first)
    if first == "devices":  # a table
        return True
    for part in rest[1:] if first == "judges" else rest:
        if part not in ("*", "FIELD"):
            kinds = types_of(kinds, part)
    return bool(kinds)


def types_of(kinds: list, name: str) -> list:
    """Types of the fields of one name."""
    infos = [kind.model_fields[name] for kind in kinds if name in getattr(kind, "model_fields", {})]
    return [one for info in infos for one in (info.annotation, *get_args(info.annotation))]  # optional ones too


def is_object(name: str) -> bool:
    """Whether a dotted name is a module of the packages, or what one has."""
    place, *rest = name.split(".")
    found = importlib.import_module(place)
    for part in rest:
        try:
            found = (
                getattr(found, part) if hasattr(found, part) else importlib.import_module(f"{found.__name__}.{part}")
            )
        except (AttributeError, ModuleNotFoundError):
            return False
    return True


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder in which a reader stands, with the examples, and the files and runs that a page makes up."""

    def prepare(words: list[str]) -> list[str]:
        given = dict(itertools.pairwise(words))
        if "--resume" in words:
            (tmp_path / given["--run_dir"]).mkdir(parents=True, exist_ok=True)
            (tmp_path / given["--run_dir"] / "config.yaml").write_text("task: text\n")
        if given.get("--config") == "my.yaml":
            (tmp_path / "my.yaml").write_text("task: text\n")
        return [SHIPPED[0] if word == "NAME" else word for word in words]

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return prepare


def refused(words: list[str]) -> str:
    """What the training command has against its arguments; "" if nothing."""
    try:
        parse(take_request(words)[1])
    except UserError as error:
        return str(error)
    except SystemExit as end:  # after --help
        return "" if not end.code else f"exit code {end.code}"
    return ""


@each_page
def test_command_lines_parse(page, desk):
    for module, words in commands(PAGES[page]):
        if module == "grpo_jax.train":
            assert not refused(desk(words)), words
        elif module == "grpo_jax.cartpole":  # it would train
            read_options(cartpole.make_parser(), words)
        else:  # the options are known; what they name is not there
            assert OTHERS[module].main(words) == 2


@each_page
def test_options_in_the_prose_parse(page, desk):
    """Each with the values that it is given, over one of the shipped configs."""
    for words in (shlex.split(span) for span in spans(PAGES[page]) if re.match(r"--[\w.]+\.\w+ [^.…]", span)):
        assert any(not refused([f"--config={name}", *words]) for name in SHIPPED), words


@each_page
def test_fields_and_objects_exist(page):
    names = dotted_names(PAGES[page])
    ours = {name for name in names if name.partition(".")[0] in {"grpo_jax", "bridges"}}
    assert not {name for name in ours if not is_object(name)}
    sections = {name for name in names if re.split(r"\W", name)[0] in SECTIONS}
    assert not {name for name in sections if not is_field(name) and not is_object(f"grpo_jax.{name}")}


@each_page
def test_files_exist(page):
    text = PAGES[page]
    named = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*\w)", text)
    assert not [path for path in named if not any(ROOT.glob(path.replace("NAME", "*")))]
    links = [link.partition("#") for link in re.findall(r"]\(([^)\s]+)\)", prose(text)) if "://" not in link]
    targets = [((ROOT / page).parent / path if path else ROOT / page, anchor) for path, _, anchor in links]
    assert not [path for path, _ in targets if not path.exists()]
    assert not [(path.name, anchor) for path, anchor in targets if anchor and anchor not in anchors(path.read_text())]


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_code_fits_a_window(page):
    """In 100 columns; generated tables of RESULTS are wider."""
    text = PAGES[page]
    code = [line for body in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S) for line in body.splitlines()]
    code += re.findall(r"^ {4,}.*$", prose(text), re.MULTILINE)
    assert not [line for line in code if len(line) > 100]


@each_page
def test_yaml_and_imports_of_code_blocks_are_right(page, tmp_path):
    for block in blocks(PAGES[page], "yaml"):
        given = yaml.safe_load(block)
        assert any(accepted({"task": name} | given) for name in TASK_NAMES), block
    for number, block in enumerate(blocks(PAGES[page], "python")):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block)
        assert not list(import_checks.dangling(script)), block


def accepted(values: dict) -> bool:
    try:
        make_config(values)
    except UserError:
        return False
    return True
