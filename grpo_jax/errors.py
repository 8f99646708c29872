"""Errors that commands show in one line: without a traceback, with an exit code."""

from __future__ import annotations

import argparse
import difflib
import os
import reprlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NoReturn

EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "diffusers", "open_clip", "accelerate", "PIL"), "diffusion"),
    **dict.fromkeys(("sklearn", "sentence_transformers"), "recommendation"),
    "ray": "ray",
    **dict.fromkeys(("tensorboard", "wandb"), "logging"),
    "qwix": "quantised",
    "gradio": "demo",
    **dict.fromkeys(("reasoning_gym", "websockets"), "environments"),
}
"""The extra of each lazily imported module."""
_SHOWN_CHARACTERS = 140  # shown of a mistake in data
_LEAVING_SECONDS = 15.0
ABANDONED = "abandoned "
"""Prefix of the names of threads that are not waited for."""


def version() -> str:
    """Return the package's version for the commands."""
    from importlib import metadata

    try:
        return metadata.version("grpo_jax")
    except metadata.PackageNotFoundError:
        return "a checkout that is not installed"


class UserError(Exception):
    """A mistake that the user can fix; each line names it and its remedy. Commands exit with 2."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class Problems:
    """Mistakes in data: their number, and the first two in words, since a file may hold millions."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[str] = []

    def add(self, message: str) -> None:
        """Add a mistake."""
        self.count += 1
        if len(self.shown) < 2:
            self.shown.append(_cut(message, _SHOWN_CHARACTERS))

    def refuse(self, subject: str) -> None:
        """Raise UserError, in one line, if there are any."""
        more = [f"and {self.count - 2} more"] if self.count > 2 else []
        if self.count:
            lines = "bad line" if self.count == 1 else "bad lines"
            raise UserError(f"{subject}: {self.count} {lines}: {'; '.join([*self.shown, *more])}")


class FieldError(UserError, ValueError):
    """An invalid value of a field; pydantic collects it, since it is a ValueError."""


class StopRun(UserError):
    """A judge or the data is permanently unavailable: the run saves and ends. It never becomes a missing reward."""


class Stopped(BaseException):
    """A stop was requested (SIGTERM, Ctrl-C) while a run waits."""


class StageError(RuntimeError):
    """A stage raised; the original exception is the `__cause__`. Has `stage` (name) and `chunk` (index)."""

    def __init__(self, stage: str, chunk: int, reason: str):
        super().__init__(f"stage {stage!r} failed on chunk {chunk}: {reason}")
        self.stage = stage
        self.chunk = chunk


class StageTimeout(StageError):
    """A stage took longer than allowed for one chunk."""


def one_line(value: object, limit: int = 100) -> str:
    """Return one printable line of at most `limit` characters for a user's text, exception or object.

    It never raises, even if the object's methods do. Strings and exceptions are shown by str, other objects by repr.
    """
    try:
        text = str(value) if isinstance(value, str | BaseException) else reprlib.repr(value)
    except BaseException:
        text = f"<{type(value).__name__}>"
    words = " ".join(text[: 4 * limit].split())
    return _cut("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words), limit)


def raised_by_user_code(error: BaseException) -> bool:
    """Return whether an error is a judge's own, not `StopRun` or a signal, which only reaches the main thread."""
    interrupt = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
    return not interrupt and not isinstance(error, StopRun | Stopped)


@contextmanager
def failures_as(describe: Callable[[BaseException], BaseException]) -> Iterator[None]:
    """Raise describe(error) in place of an error of a user's code inside (`raised_by_user_code`); others propagate."""
    try:
        yield
    except BaseException as error:
        described = describe(error) if raised_by_user_code(error) else error
        if described is error:
            raise
        raise described from error


def short_repr(value: object, most: int = 60) -> str:
    """Return a value for an error line: its repr, in at most `most` characters."""
    try:
        text = repr(value)
    except Exception as error:  # a number of 5000 digits, an endless list, a user's class
        text = f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return _cut(text, most)


def short_name(name: object, most: int = 80) -> str:
    """Return a name for an error line: unchanged if short and printable, else its repr; for a long path its end."""
    text = str(name)
    if text.isprintable() and (len(text) <= most or "/" in text):
        return text if len(text) <= most else f"…{text[1 - most :]}"
    return short_repr(text, most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


@contextmanager
def extras_named() -> Iterator[None]:
    """Convert a missing module of `EXTRAS` to a UserError that names its extra; also a decorator."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise UserError(f'{error.name} is not installed; run pip install "grpo_jax[{EXTRAS[error.name]}]"') from error


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without argparse's usage."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message.removeprefix('argument ')}; {self.prog} --help lists the options")


def run_parser(command: str, description: str, *, reads_run: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of all commands: --version, --debug, and --run and --checkpoint of a run."""
    parser = Parser(prog=f"grpo {command}", description=description)
    add = parser.add_argument
    if reads_run:
        add("--run", required=True, metavar="DIR", help="Run directory of a training run.")
        add("--checkpoint", default="final", help="start, final, best, latest, or a step (default: %(default)s).")
    add("--version", action="version", version=version())
    add("--debug", action="store_true", help="Show tracebacks.")
    return parser


def read_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return a command's options; UserError for an unknown one, with the nearest known one."""
    options = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and not any(one.startswith(name) for one in options):
            near = difflib.get_close_matches(name, options, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(options)}"
            raise UserError(f"{short_name(name)}: no such option; {hint}")
    home = f"={os.path.expanduser('~')}/"  # which no shell puts for ~ in --out=~/lora
    return parser.parse_args([word.replace("=~/", home, 1) if word.startswith("--") else word for word in words])


def command(
    make_parser: Callable[[], argparse.ArgumentParser], act: Callable[[argparse.Namespace], None]
) -> Callable[..., int]:
    """Return the `main` of a command that reads a run: arguments (None: the process's own) → exit code."""

    def main(arguments: Sequence[str] | None = None) -> int:
        return run_cli(lambda words: act(read_options(make_parser(), words)), arguments)

    return main


def run_cli(
    act: Callable[[list[str]], object], arguments: Sequence[str] | None, *, silent: Callable[[], bool] = lambda: False
) -> int:
    """Run a command on its arguments (None: the process's own) and return its exit code.

    A user's mistake or a failed judge prints one line and gives 2, an interrupt 130; an int from `act` is the code.
    --debug shows tracebacks. `silent` returns whether another process prints the line.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if not debug:
        quiet_libraries()
    with suppress(AttributeError):  # of a stream that is no file
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with extras_named():
            result = act(words)
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as in `--help all | head`
        return 0
    except Exception as error:
        lines = _lines_of(error)
        if debug or lines is None:
            raise
        for line in () if silent() else lines:  # one line each, although a file or library may have put more into them
            complain(f"error: {' '.join(str(line).split())}")
        return 2
    return result if isinstance(result, int) else 0


def quiet_libraries() -> None:
    """Hide logs that look like errors: XLA's of a slow compilation, whose real errors are raised, and transformers'."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"


def _lines_of(error: Exception) -> Sequence[object] | None:
    """Return the lines of a self-explanatory error; None for an error that needs its traceback."""
    if isinstance(error, UserError):
        return error.args
    sampling = isinstance(error, StageError) and error.stage.startswith("sample")
    if isinstance(error, StageError) and not sampling:
        return [error]
    exhausted = "RESOURCE_EXHAUSTED" in str(error)  # JAX's error; torch has its own class
    if not exhausted and type(error).__name__ != "OutOfMemoryError":
        return None
    whose = "the policy" if sampling or exhausted else "a judge in PyTorch"
    return [f"{whose} ran out of its device's memory ({one_line(error, 200)}); `grpo plan` shows a run's memory"]


def complain(text: str) -> None:
    """Write a line to standard error, if it is still open."""
    with suppress(OSError, ValueError):  # standard error may be closed
        print(text, file=sys.stderr, flush=True)


def exit_on_interrupt() -> None:
    """Let a Ctrl-C outside `main`, while a command's modules are imported, print one line and exit with 130."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            return before(kind, error, trace)
        complain("interrupted")
        os._exit(130)

    sys.excepthook = hook


def exit_process(code: int) -> NoReturn:
    """End a command's process; Python's exit would wait for every thread, even one that hangs in a judge."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the reader is gone, and Python would report that at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    def end_anyway() -> None:
        time.sleep(_LEAVING_SECONDS)
        os._exit(code)

    if any(thread.name.startswith(ABANDONED) for thread in threading.enumerate()):
        os._exit(code)  # a thread may still use torch or JAX, whose teardown would crash it
    threading.Thread(target=end_anyway, daemon=True).start()
    sys.exit(code)
