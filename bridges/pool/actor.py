"""Code of an actor: one copy of a judge, asked batch by batch.

Ray sends this code along, so that an interpreter with other packages needs Ray and the judge's own needs alone.
Therefore only Python and NumPy are imported here, and messages are plain tuples.
"""

import asyncio
import contextlib
import inspect
import os
import sys

import numpy as np


class JudgeActor:
    """A judge, loaded when it is first asked: an error of loading it arrives as what it raises later does."""

    def __init__(self, packed, device, settings):
        """Take the pickled judge, and "cpu" or "gpu:0" of the cards that Ray has given this actor.

        `settings` has the run's "folder", whether to "check" the judge and to use "deterministic" kernels, and whether
        torch may round float32 to "tf32" on a card.
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
        with plain_errors():
            judge = self._load()
            attributes, methods = {}, []
            for name in dir(judge):
                if name.startswith("_"):
                    continue
                try:
                    value = getattr(judge, name)
                except Exception:  # of a property that is not ready, or asks for a package
                    continue
                if callable(value):
                    methods.append(name)
                elif is_plain(value):
                    attributes[name] = value
            return attributes, methods, signature_of(judge) if callable(judge) else None

    def call(self, method, *arguments):
        """Call a method, or the judge itself if its name is ""; tensors come to the CPU."""
        with plain_errors():
            return self._called(method, arguments, {})

    def answer(self, method, values, stored):
        """Answer one batch.

        `values` are {place among the arguments, or keyword: value}, `stored` {place: (rows, type)} those of tensors in
        the object store, as `gathered` and `as_tensor` take them.

        Returns:
            ("value", value) and None; or ("stored", (shape, type)) and the array of a tensor with more than one axis.
        """
        with plain_errors():
            import ray

            device = getattr(self._load(), "device", None)
            given = dict(values)
            for place, (rows, kind) in stored.items():
                given[place] = as_tensor(gathered(rows, ray.get), kind, device)
            keywords = {place: given.pop(place) for place in list(given) if isinstance(place, str)}
            value = self._called(method, [given[place] for place in sorted(given)], keywords)
            if not is_tensor(value) or value.ndim < 2:
                return ("value", value), None
            array, kind = as_array(value)
            return ("stored", (tuple(value.shape), kind)), array

    def _called(self, method, arguments, keywords):
        judge = self._load()
        value = (getattr(judge, method) if method else judge)(*arguments, **keywords)
        return on_host(asyncio.run(value) if inspect.iscoroutine(value) else value)


@contextlib.contextmanager
def plain_errors():
    """Raise what is no Exception as one: sys.exit in a judge must not end the actor."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def signature_of(judge):
    """The arguments of a call without their types and defaults, which another interpreter need not have."""
    parameters = inspect.signature(judge).parameters.values()
    plain = {one: one.empty if one.default is one.empty else None for one in parameters}
    return inspect.Signature([one.replace(annotation=one.empty, default=plain[one]) for one in parameters])


def is_plain(value):
    """Tell whether a value consists of built-in types alone, which any interpreter can unpickle."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str, bytes)


def is_tensor(value):
    """Like isinstance(value, torch.Tensor), also where torch is not installed."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def on_host(value):
    """Move a value's tensors, also those in lists, tuples and dictionaries, to the CPU, without gradients."""
    if "torch" not in sys.modules:
        return value
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.detach().cpu() if is_tensor(leaf) else leaf, value)


def as_array(tensor):
    """Return a tensor as NumPy, which the object store lends without copying, and the tensor's type."""
    kind = str(tensor.dtype).rpartition(".")[2]
    if kind == "bfloat16":  # NumPy has none
        import torch

        tensor = tensor.contiguous().view(torch.int16)
    return tensor.contiguous().numpy(), kind


def as_tensor(array, kind, device):
    """The inverse of `as_array`, on a device."""
    import torch

    tensor = torch.from_numpy(array)
    tensor = tensor.view(torch.bfloat16) if kind == "bfloat16" else tensor
    return tensor if device is None else tensor.to(device)


def gathered(rows, get):
    """Copy rows, each (reference of an array, number of the row), into one array; `get` fetches a list of references.

    Memory lent by the object store cannot be written to.
    """
    references = list(dict.fromkeys(reference for reference, _ in rows))
    arrays = dict(zip(references, get(references), strict=True))
    if len(references) == 1:
        return arrays[references[0]][[row for _, row in rows]]
    return np.stack([arrays[reference][row] for reference, row in rows])
