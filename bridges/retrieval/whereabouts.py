"""Addresses of a user's own services: `serve` leaves its cluster's in a file that only the user can write.

Ray's own ways to find a cluster (RAY_ADDRESS, "auto") find anybody's: a run joins what this file or its config names.
"""

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from bridges.retrieval.catalogue import default_cache
from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError


class Whereabouts(NamedTuple):
    """Cluster of one service, HOST:PORT, and its session: another one at that address is another cluster."""

    address: str
    session: str


def service_file(service: str) -> Path:
    """The file of a service of this name on this machine."""
    name = quote(f"{service}@{socket.gethostname()}", safe="@")  # homes are shared, loopbacks are not
    return default_cache().parent / "services" / f"{name}.json"


@contextmanager
def announced(service: str, where: Whereabouts) -> Iterator[None]:
    """Keep the file of a service while the block runs; UserError if it cannot be written."""
    path = service_file(service)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)  # 0600
        with os.fdopen(handle, "w") as file:
            json.dump(where._asdict(), file)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}), where training looks for the service") from error
    try:
        yield
    finally:
        with suppress(OSError, ValueError, UserError):
            if find_service(service) == where:  # not another's, who came after it
                path.unlink()


def find_service(service: str) -> Whereabouts | None:
    """Find this user's service of that name, which may have been killed since; None if no file names it.

    UserError if somebody else can write the file, or it is broken.
    """
    path = service_file(service)
    try:
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise UserError(f"{path} can be written by others; remove it and start the service again")
        return Whereabouts(**load_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read; remove it and start the service again") from error
