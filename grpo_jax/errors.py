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
from typing import NoReturn

EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "diffusers", "open_clip", "accelerate", "PIL"), "diffusion"),
    **dict.fromkeys(("sklearn", "sentence_transformers"), "recommendation"),
    "ray": "ray",
    **dict.fromkeys(("tensorboard", "wandb"), "logging"),
    "qwix": "quantised",
    "gradio": "demo",
}
"""The extra that brings a module which is imported only where it is needed."""
_SHOWN_CHARACTERS = 140  # of mistakes in data


def version() -> str:
    """The package's version, as the commands print it."""
    from importlib import metadata

    try:
        return metadata.version("grpo_jax")
    except metadata.PackageNotFoundError:
        return "a checkout that is not installed"


class UserError(Exception):
    """A mistake that the user can fix: each line names it and its remedy. Commands exit with 2."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class Problems:
    """Mistakes in data, counted, and the first two in words: a file may hold millions."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[str] = []

    def add(self, message: str) -> None:
        """Note one."""
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
    """An invalid value of a field; as a ValueError it is one of those that pydantic collects."""


class StopRun(UserError):
    """A judge, or the data, is gone for good: the run saves and ends. Never turned into a missing reward."""


class Stopped(BaseException):
    """A stop was asked for (SIGTERM, Ctrl-C) while a run waits; `iteration` is the one that was saved, if any."""

    iteration: int | None = None


class StageError(RuntimeError):
    """A stage raised; the original exception is the `__cause__`. Has `stage` (name) and `chunk` (index)."""

    def __init__(self, stage: str, chunk: int, reason: str):
        super().__init__(f"stage {stage!r} failed on chunk {chunk}: {reason}")
        self.stage = stage
        self.chunk = chunk


class StageTimeout(StageError):
    """A stage took longer than allowed for one chunk."""


def one_line(value: object, limit: int = 100) -> str:
    """One printable line, of `limit` characters, of a user's text, exception or object.

    Never raises, whatever its own methods do. Texts and exceptions are shown as they are, other objects as repr.
    """
    try:
        text = str(value) if isinstance(value, str | BaseException) else reprlib.repr(value)
    except BaseException:
        text = f"<{type(value).__name__}>"
    words = " ".join(text[: 4 * limit].split())
    return _cut("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words), limit)


def is_own_doing(error: BaseException) -> bool:
    """Return whether an error is a judge's own: no `StopRun`, and no signal, which reaches the main thread alone."""
    interrupt = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
    return not interrupt and not isinstance(error, StopRun | Stopped)


@contextmanager
def failures_as(describe: Callable[[BaseException], BaseException]) -> Iterator[None]:
    """Raise describe(error) in place of an error of a user's own code inside (`is_own_doing`); others pass."""
    try:
        yield
    except BaseException as error:
        described = describe(error) if is_own_doing(error) else error
        if described is error:
            raise
        raise described from error


def short_repr(value: object, most: int = 60) -> str:
    """A value as an error line shows it: its repr, in so many characters at most."""
    try:
        text = repr(value)
    except Exception as error:  # a number of 5000 digits, a list without end, anyone's own class
        text = f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return _cut(text, most)


def short_name(name: object, most: int = 80) -> str:
    """A name as an error line shows it: as it stands if it is short and printable; of a long path its end."""
    text = str(name)
    if text.isprintable() and (len(text) <= most or "/" in text):
        return text if len(text) <= most else f"…{text[1 - most :]}"
    return short_repr(text, most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


@contextmanager
def extras_named() -> Iterator[None]:
    """Raise UserError with the extra that brings a module of `EXTRAS` not found inside; a decorator too."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise UserError(f'{error.name} is not installed; run pip install "grpo_jax[{EXTRAS[error.name]}]"') from error


def run_parser(command: str, description: str, *, reads_run: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of all commands: --version, --debug, and --run and --checkpoint of a run."""
    parser = argparse.ArgumentParser(prog=f"grpo {command}", description=description)
    if reads_run:
        parser.add_argument("--run", required=True, metavar="DIR", help="Run directory of a training run.")
        parser.add_argument(
            "--checkpoint", default="final", help="start, final, best, latest, or a step (default: %(default)s)."
        )
    parser.add_argument("--version", action="version", version=version())
    parser.add_argument("--debug", action="store_true", help="Show tracebacks.")
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
    return parser.parse_args(words)


def command(
    make_parser: Callable[[], argparse.ArgumentParser], act: Callable[[argparse.Namespace], None]
) -> Callable[[Sequence[str] | None], int]:
    """Return the `main` of a command that reads a run: of its arguments (None: the process's own), its exit code."""

    def main(arguments: Sequence[str] | None = None) -> int:
        return run_cli(lambda words: act(read_options(make_parser(), words)), arguments)

    return main


def run_cli(
    act: Callable[[list[str]], object], arguments: Sequence[str] | None, *, silent: Callable[[], bool] = lambda: False
) -> int:
    """Run a command on its arguments (None: the process's own) and return its exit code.

    A user's mistake or a failed judge is one line and 2, an interrupt 130; an int that `act` returns is the code.
    --debug lets tracebacks through. `silent` says that another process prints the line.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        with extras_named():
            result = act(words)
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except BrokenPipeError:  # who reads the output has read enough, as in `--help all | head`
        return 0
    except Exception as error:
        lines = _lines_of(error)
        if debug or lines is None:
            raise
        for line in () if silent() else lines:  # on one line each, whatever a user's file or a library put into them
            complain(f"error: {' '.join(str(line).split())}")
        return 2
    return result if isinstance(result, int) else 0


def _lines_of(error: Exception) -> Sequence[object] | None:
    """Return the lines of an error that its message explains; None for one whose traceback is needed."""
    if isinstance(error, UserError):
        return error.args
    sampling = isinstance(error, StageError) and error.stage.startswith("sample")
    if isinstance(error, StageError) and not sampling:
        return [error]
    exhausted = "RESOURCE_EXHAUSTED" in str(error)  # JAX's; torch's has a name of its own
    if not exhausted and type(error).__name__ != "OutOfMemoryError":
        return None
    whose = "the policy" if sampling or exhausted else "a judge in PyTorch"
    return [f"{whose} ran out of its device's memory ({one_line(error, 200)}); `grpo plan` shows a run's memory"]


def complain(text: str) -> None:
    """Write a line to standard error, if anybody listens."""
    with suppress(OSError, ValueError):  # nobody may be listening any more
        print(text, file=sys.stderr, flush=True)


MALLOC_SETTINGS = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {"hugetlb": 1, "mmap_threshold": 2**32, "trim_threshold": 2**34, "top_pad": 2**26}.items()
)
"""For GLIBC_TUNABLES: large pages, and freed memory is kept for the next update rather than returned and zeroed."""
_MANAGED = ("GLIBC_TUNABLES", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "PYTEST_CURRENT_TEST")


def restart_with_memory_settings() -> None:
    """Start this process once more with `MALLOC_SETTINGS`, which glibc reads before Python starts.

    Call it first in a command's own process. It returns if there is nothing to do: settings of malloc are in the
    environment, another program manages this process, GRPO_JAX_KEEP_ENV=1, or no glibc. The process id stays.
    """
    keeps = os.environ.get("GRPO_JAX_KEEP_ENV", "") not in ("", "0")
    if keeps or any(name in os.environ for name in _MANAGED) or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # Windows, and other libraries
        return
    if glibc and sys.executable:
        with suppress(OSError):
            words = [sys.executable, *sys.orig_argv[1:]]
            os.execve(sys.executable, words, {**os.environ, "GLIBC_TUNABLES": MALLOC_SETTINGS})


_LEAVING_SECONDS = 15.0


def exit_process(code: int) -> NoReturn:
    """End a command's process; Python's own exit would wait for every thread, even one that hangs in a judge."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # its reader went away, and Python would complain of it at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    def end_anyway() -> None:
        time.sleep(_LEAVING_SECONDS)
        os._exit(code)

    if any(thread.name.startswith(ABANDONED) for thread in threading.enumerate()):
        os._exit(code)  # it may run torch or JAX, which are taken apart under it
    threading.Thread(target=end_anyway, daemon=True).start()
    sys.exit(code)


ABANDONED = "abandoned "
"""Prefix of the names of threads that nobody waits for."""
