"""A pool on an existing cluster, named by its address; missing packages and files are reported at once."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

import ray
from support.pools import ODD, load_in_pool
from support.text_task import rows, train_here

from bridges import ray_cluster
from grpo_jax.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("no_cluster")]

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
OPTIONS = ["--num-cpus=2", "--num-gpus=2", "--object-store-memory=80000000", "--include-dashboard=false"]


@pytest.fixture(scope="module")
def address():
    """HOST:PORT of a cluster as its owner starts it by hand, who says that the machine has two cards."""
    if not Path("~/.ray/auth_token").expanduser().is_file():
        subprocess.run([*RAY, "get-auth-token", "--generate"], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*RAY, "start", "--head", "--block", f"--port={port}", *OPTIONS, "--disable-usage-stats"]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # not where Ray would find it for other tests
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        head = subprocess.Popen(command, env={**os.environ, "RAY_TMPDIR": folder}, **pipes)
        yield from said_by(head, port)


def said_by(head, port):
    """Its address as soon as it says that it runs; afterwards it is ended."""
    said = ""
    try:
        while "Ray runtime started" not in said:
            line = head.stdout.readline()
            assert line, said
            said += line
        host = said.split("Local node IP: ")[1].split()[0]
        yield f"{host}:{port}"
    finally:
        for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
            with suppress(psutil.NoSuchProcess):  # some end with those before them
                process.kill()
        head.communicate()


def test_what_is_no_cluster_is_said_at_once(configured, tmp_path, capsys):
    """After a connection, and before Ray's own, of which there would be many for more than a minute."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def accept():
            with suppress(OSError):  # when the test is over
                while True:
                    connections.append(other.accept()[0])
                    connections[-1].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=accept, daemon=True).start()
        assert train_here(configured(address=address), tmp_path / "run") == 2
        assert len(connections) == 1
    reason = f"no Ray cluster answers at {address}; its owner sees HOST:PORT when it starts"
    assert capsys.readouterr().err == f"error: judges.letters.address: {reason}\n"


@pytest.mark.wide
def test_a_run_asks_judges_on_a_cluster_of_others_and_leaves_it_running(address, configured, tmp_path):
    run, steps = tmp_path / "run", ["--training.max_steps", "1", "--evaluation.every", "0"]
    assert train_here(configured(replicas=2, address=address), run, *steps) == 0
    assert [row["step"] for row in rows(run)] == [1]
    assert not ray.is_initialized()
    odd = {"kind": f"{ODD}:Odd", "folder": str(tmp_path), "replicas": 2}
    loaded = load_in_pool(**odd, address=address, resources={"num_gpus": 1})
    assert set(loaded.cards(["x"] * 4 * 40)) == {"gpu:0 of 0", "gpu:0 of 1"}  # each actor has cards of its own
    with pytest.raises(UserError, match=f"judges.odd.address: expected the cluster that .* is on already, {address}"):
        load_in_pool(**odd, address="127.0.0.1:1")
    ray_cluster.leave()
    assert not ray.is_initialized()
