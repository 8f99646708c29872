"""Files that are no files, and those without an end: read within bounds of memory and time, or refused in one line."""

import os
import threading

import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.train import main


@pytest.mark.parametrize("name", ["/dev/zero", "large.yaml"])
def test_a_config_without_an_end(tmp_path, capsys, name):
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(2**40)  # a line of a terabyte, of which the disk holds nothing
    assert main(["--config", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.endswith(f"{name}: cannot be read (it holds more than 1,048,576 bytes)\n")


def test_a_config_from_a_pipe():
    read, write = os.pipe()  # as <(command) gives it

    def tell():
        with open(write, "w") as file:
            file.write("task: text\nseed: ")
            file.flush()
            file.write("5\n")

    threading.Thread(target=tell).start()
    assert parse(["--config", f"/dev/fd/{read}"]).seed == 5
    os.close(read)
