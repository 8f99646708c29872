"""Completion for a shell's TAB key: `grpo completion bash|zsh|fish` prints a script.

It holds all commands, options and values, so no Python runs at TAB. Print it again after an update of the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grpo_jax import evaluate, export, predict, recommend, report
from grpo_jax.errors import UserError, guarded, option_names, said

SHELLS = ("bash", "zsh", "fish")
HELP = """usage: grpo completion bash|zsh|fish

Prints a script for the shell, which completes commands, options, configs, tasks and values:

  grpo completion bash > ~/.local/share/bash-completion/completions/grpo
  grpo completion zsh > ~/.zfunc/_grpo        (with fpath+=~/.zfunc before compinit in ~/.zshrc)
  grpo completion fish > ~/.config/fish/completions/grpo.fish"""
_TRAINING = ("train", "resume", "plan")
_COMMANDS = (evaluate, export, predict, report, recommend)


class Words(NamedTuple):
    """Words to complete: commands, each command's options with their dashes, options' values and help lines."""

    commands: tuple[str, ...]
    options: dict[tuple[str, ...], list[str]]
    values: dict[str, list[str]]
    lines: dict[str, str]


def main(arguments: Sequence[str], commands: Sequence[str]) -> int:
    """Print the script for a shell; return the exit code."""
    return guarded(lambda: print(_answer(arguments, commands)))


def _answer(arguments: Sequence[str], commands: Sequence[str]) -> str:
    if list(arguments) in (["-h"], ["--help"]):
        return HELP
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        came = said(" ".join(arguments)) if arguments else "nothing"
        raise UserError(f"completion: expected bash, zsh or fish, got {came}")
    words = read_words(commands)
    if arguments[0] == "fish":
        return _fish(words)
    return _filled(_BASH, words, 'words="{}"') if arguments[0] == "bash" else _filled(_ZSH, words, "offered=({})")


def read_words(commands: Sequence[str]) -> Words:
    """Return all words: the fields of every task that ships with the package, with its own judges."""
    from grpo_jax.config.build import complete
    from grpo_jax.config.command_line import FLAGS, shipped_configs
    from grpo_jax.config.help import choices_of, clause, sections_of
    from grpo_jax.config.named import built_in_names
    from grpo_jax.config.run import TASKS, find_task, with_defaults
    from grpo_jax.planning import MEMORY, PLAN

    words = Words(tuple(commands), {_TRAINING: []}, {}, {})
    values: dict[str, dict[str, None]] = {"--config": dict.fromkeys(shipped_configs()), "--help": {"all": None}}
    for task in built_in_names(TASKS):
        kind = find_task(task).config
        for section in sections_of(kind, complete(kind, with_defaults({"task": task}))):
            values["--help"][section.name] = None
            for option in section.options:
                if option.is_argument:
                    name = f"--{option.name}"
                    words.lines.setdefault(name, clause(option.line))
                    values.setdefault(name, {}).update(dict.fromkeys(option.names or choices_of(option.hint)))
    others = ("--print_config", PLAN, MEMORY, "--version")
    words.options[_TRAINING].extend([*dict.fromkeys([*values, *words.lines, *others])])
    for command in _COMMANDS:
        parser = command.make_parser()
        words.options[(command.__name__.rpartition(".")[2],)] = option_names(parser)
        for action in parser._actions:
            values |= {name: dict.fromkeys(action.choices) for name in action.option_strings if action.choices}
    words.values.update({name: [*found] for name, found in values.items() if found and name not in FLAGS})
    return words


_BASH = """# Completion of grpo for bash, printed by: grpo completion bash
_grpo() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=
    if [[ $current == = ]]; then current=
    elif [[ $previous == = ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    if (( COMP_CWORD == 1 )); then words="{commands}"; fi
    case $previous in
{values}
    esac
    if [[ -z $words && $current == -* ]]; then
        case $command in
{options}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _grpo grpo"""

_ZSH = """#compdef grpo
# Completion of grpo for zsh, printed by: grpo completion zsh
_grpo() {{
    local previous=$words[CURRENT-1] command=$words[2]
    local -a offered
    if compset -P '--*='; then previous=${{IPREFIX%=}}; fi
    if (( CURRENT == 2 )); then offered=({commands}); fi
    case $previous in
{values}
    esac
    if (( ! $#offered )) && [[ $PREFIX == -* ]]; then
        case $command in
{options}
        esac
    fi
    if (( $#offered )); then compadd -a offered; else _files; fi
}}
if [[ $funcstack[1] == _grpo ]]; then _grpo "$@"; else compdef _grpo grpo; fi"""


def _filled(script: str, words: Words, assigned: str) -> str:
    def branches(by_name: Mapping[str, Sequence[str]], indent: int) -> str:
        return "\n".join(f"{'':{indent}}{name}) {assigned.format(' '.join(of))};;" for name, of in by_name.items())

    values = {**words.values, "completion": SHELLS}
    options = {"|".join(commands): names for commands, names in words.options.items()}
    return script.format(
        commands=" ".join(words.commands),
        values=branches(values, 8),
        options=branches(options, 12),
    )


def _fish(words: Words) -> str:
    lines = ["# Completion of grpo for fish, printed by: grpo completion fish"]
    lines += [f"complete -c grpo -f -n __fish_use_subcommand -a {command}" for command in words.commands]
    lines.append(f"complete -c grpo -f -n '__fish_seen_subcommand_from completion' -a '{' '.join(SHELLS)}'")
    for commands, names in words.options.items():
        where = f"complete -c grpo -n '__fish_seen_subcommand_from {' '.join(commands)}'"
        for name in names:
            values = f" -x -a '{' '.join(words.values[name])}'" if name in words.values else ""
            about = words.lines.get(name, "").replace("\\", "\\\\").replace("'", "\\'")
            lines.append(f"{where} -l {name[2:]}{values}" + (f" -d '{about}'" if about else ""))
    return "\n".join(lines)
