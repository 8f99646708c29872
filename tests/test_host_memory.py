"""Freed memory stays with a process that asks for it; settings of the user's own stand."""

import subprocess
import sys

import pytest

from grpo_jax.host_memory import keep_freed_memory

# Ten times the same 160 MB in pieces of 20 MB, and how many pages the system had to hand out after the first time.
PROGRAM = """
import resource, sys
from grpo_jax.host_memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory({}):
    sys.exit("another C library")
def fill():
    pieces = [b"x" * (20 << 20) for _ in range(8)]
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(9):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(argument):
    done = subprocess.run([sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True)
    if "another C library" in done.stderr:
        pytest.skip("only glibc can be asked to keep freed memory")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_that_is_kept_is_not_asked_for_again():
    assert pages("keep") < pages("leave") / 10


@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0"}],
)
def test_settings_of_the_users_own_stand(environment):
    assert not keep_freed_memory(environment)
