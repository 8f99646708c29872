"""`grpo completion bash|zsh`: print a script that completes `grpo` in a shell without starting Python."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from grpo_jax import demo, evaluate, export, predict, recommend, report
from grpo_jax.cartpole import __main__ as cartpole
from grpo_jax.config.command_line import find_config, read_config, shipped_configs
from grpo_jax.config.fields import merged, walk
from grpo_jax.config.run import TASKS, Config
from grpo_jax.errors import command, run_parser
from grpo_jax.planning import MEMORY, TARGET

_SHELLS = {"bash": "", "zsh": "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"}
_FILE = "FILE"  # any file, as an option's last value
_SCRIPT = """\
_grpo() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" choices=""
    if [ "$word" = "=" ]; then word=""; fi
    if [ "$before" = "=" ]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    if [[ "$word" == -* ]]; then before="${{COMP_WORDS[1]}} -"; fi
    case "$before" in
{cases}
        *) choices="{file}";;
    esac
    COMPREPLY=($(compgen -W "${{choices%{file}}}" -- "$word"))
    local IFS=$'\\n'
    if [[ "$choices" == *{file} ]]; then COMPREPLY+=($(compgen -f -- "$word")); fi
}}
complete -o filenames -F _grpo grpo"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = run_parser("completion", "Print a completion script: source <(grpo completion bash)", reads_run=False)
    parser.add_argument("shell", choices=_SHELLS)
    return parser


def _values(hint: Any) -> Sequence[str]:
    """Return the possible words for a field of this type."""
    if hint in (bool, str) or get_origin(hint) is Literal:
        return ("true", "false") if hint is bool else (_FILE,) if hint is str else [*map(str, get_args(hint))]
    return [value for inner in get_args(hint) for value in _values(inner)]


def _print(options: argparse.Namespace) -> None:
    values: dict[str, Sequence[str]] = {}
    sections = {"all": None}
    for name in TASKS.kinds:
        task: Any = TASKS.class_of(name)
        default = read_config(find_config(task.default_config)) if task.default_config else {}
        fields = walk(Config, merged(merged(task.defaults, default), {"task": name}))
        for field in (field for field in fields if not field.inner and "[]" not in field.path):
            sections[field.section or "run"] = None
            values[f"--{field.path}"] = _values(field.info.annotation)
    trains = ["--config", "--help", "--print_config", "--debug", "--rewards", *values]
    starts = {"train": trains, "resume": trains, "plan": [MEMORY, TARGET, *trains], "completion": []}
    for module in (cartpole, demo, evaluate, export, predict, recommend, report):
        parser = module.make_parser()
        options_of = [action.option_strings[-1] for action in parser._actions if action.option_strings]
        starts[parser.prog.removeprefix("grpo ")] = options_of
    values |= {"--config": [*shipped_configs(), _FILE], "--task": [*TASKS.kinds, _FILE], "--help": [*sections]}
    values |= {"grpo": [*starts], "completion": [*_SHELLS]} | {f"{name} -": words for name, words in starts.items()}
    cases = [f'        "{word}") choices="{" ".join(names)}";;' for word, names in values.items()]
    print(_SHELLS[options.shell] + _SCRIPT.format(cases="\n".join(cases), file=_FILE))


main = command(make_parser, _print)
