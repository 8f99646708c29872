"""The library that makes calls fail: it counts what changes files and fails what it is told to, in real runs too."""

import errno
import os
import subprocess
import sys

import pytest
from faults import disk

WORK = """
import os, subprocess, sys

def attempt(name, work):
    try:
        work()
    except OSError as error:
        print(name, error.errno)

def append(text):
    with open("log", "a") as file:
        file.write(text)

os.chdir(sys.argv[1])
attempt("mkdir", lambda: os.mkdir("folder"))
attempt("first", lambda: append("a"))
attempt("second", lambda: append("b"))
attempt("rename", lambda: os.rename("log", sys.argv[1] + "/folder/log"))
attempt("read", lambda: open("folder/log").read())
attempt("outside", lambda: open(sys.argv[1] + "_outside", "w").write("c"))
subprocess.run([sys.executable, "-c", "open('child', 'w').write('d')"], check=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        return disk.build(tmp_path_factory.mktemp("library"))
    except disk.Unavailable as reason:
        pytest.skip(str(reason))


def work(library, folder, **fault):
    """What went wrong in a script that changes files in a folder, and its calls, their paths from there."""
    folder.mkdir()
    log = folder.with_suffix(".log")
    environment = os.environ | {"LD_PRELOAD": str(library)} | disk.failing(folder, log, **fault)
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(folder)], env=environment, capture_output=True, text=True, check=True
    )
    calls = [line.split(" ", 1)[1].replace(str(folder), "") for line in log.read_text().splitlines()]
    return done.stdout.splitlines(), calls


def test_calls_that_change_files_are_counted(library, tmp_path):
    """What is read, what lies elsewhere, and what a child does are none of them."""
    failed, calls = work(library, tmp_path / "all")
    assert failed == []
    names = [call.replace("open64", "open").replace("renameat", "rename") for call in calls]
    assert names == ["mkdir /folder", "open /log", "write /log", "open /log", "write /log", "rename /folder/log"]
    _, calls = work(library, tmp_path / "some", match="write *")
    assert calls == ["write /log", "write /log"]


def test_the_call_that_was_asked_for_fails(library, tmp_path):
    failed, _ = work(library, tmp_path / "third", at=3, code=errno.ENOSPC)
    assert failed == [f"first {errno.ENOSPC}"]
    failed, _ = work(library, tmp_path / "written", match="write */log", at=2, code=errno.EIO)
    assert failed == [f"second {errno.EIO}"]
    failed, _ = work(library, tmp_path / "always", at=3, times=-1, code=errno.EACCES)
    assert failed == [f"{name} {errno.EACCES}" for name in ("first", "second", "rename")] + [f"read {errno.ENOENT}"]
