"""Code of an actor: one copy of a judge, asked batch by batch.

Ray sends this code along, so that an interpreter with other packages needs Ray and the judge's own needs alone.
Therefore only Python and NumPy are imported here.
"""

import asyncio
import contextlib
import faulthandler
import inspect
import os
import sys

import numpy as np

START_SECONDS = 600.0
"""To load a judge: large weights on a slow disk, or a cluster that grows, take minutes."""


class JudgeActor:
    """A judge, loaded when it is first asked: an error of loading it arrives as what it raises later does."""

    def __init__(self, packed, device, settings):
        """Take the pickled judge, and "cpu" or "gpu:0" of the cards that Ray has given this actor.

        `settings` has the run's "folder", a batch's "timeout" in seconds, whether to "check" the judge and to use
        "deterministic" kernels, and whether torch may round float32 to "tf32" on a card.
        """
        self._packed = packed
        self._device = device
        self._settings = settings
        self._judge = None

    def _load(self):
        if self._judge is not None:
            return self._judge
        from ray import cloudpickle

        if os.path.isdir(self._settings["folder"]):
            os.chdir(self._settings["folder"])  # a config's paths begin there
        if self._device == "cpu":
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if self._settings["deterministic"]:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            import torch

            torch.use_deterministic_algorithms(True)
        if self._device != "cpu" and not self._settings["tf32"]:
            import torch

            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        judge = cloudpickle.loads(self._packed)
        if self._settings["check"]:
            getattr(judge, "check", lambda: None)()
        self._judge = judge.load(self._device)
        return self._judge

    def describe(self):
        """Load the judge; return its plain public attributes, names of methods, and signature (None without one)."""
        with limited(START_SECONDS):
            judge = self._load()
            public = {name: value_of(judge, name) for name in dir(judge) if not name.startswith("_")}
            plain = {name: value for name, value in public.items() if is_plain(value)}
            plain["title"] = str(judge) if type(judge).__str__ is not object.__str__ else type(judge).__name__
            methods = [name for name, value in public.items() if callable(value)]
            return plain, methods, signature_of(judge) if callable(judge) else None

    def answer(self, method, arguments, keywords):
        """Call a method about one batch, or the judge itself if its name is ""."""
        judge = self._load()
        with limited(self._settings["timeout"]):
            device = getattr(judge, "device", None)
            call = getattr(judge, method) if method else judge
            value = call(*[own(one, device) for one in arguments], **{k: own(v, device) for k, v in keywords.items()})
            return on_host(asyncio.run(value) if inspect.iscoroutine(value) else value)


@contextlib.contextmanager
def limited(seconds):
    """End the process after some seconds, though the interpreter's lock be held; raise an exit as an Exception."""
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:  # sys.exit in a judge must not end the actor
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def value_of(judge, name):
    """Return an attribute; a property that is not ready, or asks for a package, is an object."""
    try:
        return getattr(judge, name)
    except Exception:
        return object()


def signature_of(judge):
    """Return the arguments of a call without types and defaults, which another interpreter need not have."""
    parameters = inspect.signature(judge).parameters.values()
    plain = {one: one.empty if one.default is one.empty else None for one in parameters}
    return inspect.Signature([one.replace(annotation=one.empty, default=plain[one]) for one in parameters])


def is_plain(value):
    """Return whether a value is of built-in types alone, which any interpreter can unpickle."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def is_tensor(value):
    """Return isinstance(value, torch.Tensor), also where torch is not installed."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def own(value, device=None):
    """Copy an array, which Ray lends read-only; a tensor to a device, if one is named."""
    if is_tensor(value):
        return value.to(device, copy=True) if device else value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def on_host(value):
    """Move a value's tensors, also those in lists, tuples and dictionaries, to the CPU, as Ray can lend them."""
    if "torch" not in sys.modules:
        return value
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.detach().cpu().contiguous() if is_tensor(leaf) else leaf, value)
