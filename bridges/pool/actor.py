"""Code of an actor: one copy of a judge, asked batch by batch.

Ray sends this code along, so that an interpreter with other packages needs Ray and the judge's own needs alone.
Therefore only Python and NumPy are imported here, and messages are plain tuples.
"""

import asyncio
import inspect
import os
import sys
import traceback

import numpy as np


class JudgeActor:
    """A loaded judge; an exception that it raises is an answer like any other."""

    def __init__(self, packed, device, settings):
        """Load the pickled judge onto "cpu" or "gpu:0" of the cards that Ray has given this actor.

        `settings` has the run's "folder", and whether to "check" the judge and to use "deterministic" kernels.
        """
        self._judge = self._failure = None
        try:
            from ray import cloudpickle

            if os.path.isdir(settings["folder"]):
                os.chdir(settings["folder"])  # a config's paths begin there
            if device == "cpu":
                os.environ.setdefault("JAX_PLATFORMS", "cpu")
            if settings["deterministic"]:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                import torch

                torch.use_deterministic_algorithms(True)
            judge = cloudpickle.loads(packed)
            if settings["check"]:
                getattr(judge, "check", lambda: None)()
            self._judge = judge.load(device)
        except BaseException as error:
            self._failure = failure(error)

    def describe(self):
        """Return ("raised", …) where the judge could not be loaded, else ("done", its `described`)."""
        return self._failure or ("done", described(self._judge))

    def answer(
        self, method: str, arguments: tuple, keywords: dict[str, object], pieces: dict, *stored: np.ndarray
    ) -> tuple[tuple, np.ndarray | None]:
        """Answer one batch; `method` "" calls the judge itself.

        `pieces` are {place among the arguments, or keyword: (rows, kind)}; rows are (number among `stored`, row).

        Returns:
            ("done", value) and None; ("stored", (shape, type)) and an array; ("raised", …) and None.
        """
        try:
            if self._failure:
                return self._failure, None
            device = getattr(self._judge, "device", None)
            filled = {key: as_tensor(gathered(rows, stored), kind, device) for key, (rows, kind) in pieces.items()}
            arguments = [filled.get(place, argument) for place, argument in enumerate(arguments)]
            keywords = {name: filled.get(name, value) for name, value in keywords.items()}
            value = (getattr(self._judge, method) if method else self._judge)(*arguments, **keywords)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            value = on_host(value)
            if not is_tensor(value) or value.ndim < 2:
                return ("done", value), None
            array, kind = as_array(value)
            return ("stored", (tuple(value.shape), kind)), array
        except BaseException as error:  # sys.exit in a judge must not end the actor
            return failure(error), None


def failure(error):
    """An exception as an answer: itself where it can be pickled, its type, message and traceback."""
    from ray import cloudpickle

    text = "".join(traceback.format_exception(error))
    try:
        packed = cloudpickle.dumps(error)
    except Exception:
        packed = None
    return "raised", (packed, type(error).__name__, str(error), text)


def described(judge):
    """Plain public attributes, names of public methods, and the arguments of a call (None if it cannot be called)."""
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


def signature_of(judge):
    """Return (name, kind, whether it has a default) of each argument; of any function where none can be read."""
    try:
        parameters = inspect.signature(judge).parameters.values()
    except (TypeError, ValueError):
        return [("arguments", "VAR_POSITIONAL", False), ("keywords", "VAR_KEYWORD", False)]
    return [(one.name, one.kind.name, one.default is not one.empty) for one in parameters]


def is_plain(value):
    """Tell whether a value consists of built-in types alone, which any interpreter can unpickle."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str, bytes)


def is_tensor(value):
    """Like isinstance(value, torch.Tensor), also where torch is not installed."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def on_host(value):
    """Move a value's tensors, also those in lists and tuples, to the CPU, without gradients."""
    if is_tensor(value):
        return value.detach().cpu()
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(on_host, value))
    return {key: on_host(entry) for key, entry in value.items()} if type(value) is dict else value


def as_array(tensor):
    """Return a tensor as NumPy, which the object store lends without copying, and the tensor's type."""
    kind = str(tensor.dtype).rpartition(".")[2]
    if kind == "bfloat16":  # NumPy has none
        import torch

        tensor = tensor.contiguous().view(torch.int16)
    return tensor.contiguous().numpy(), kind


def as_tensor(array, kind, device):
    """The inverse of `as_array`, on a device; arrays of NumPy (kind "numpy") stay so."""
    if kind == "numpy":
        return array
    import torch

    tensor = torch.from_numpy(array)
    tensor = tensor.view(torch.bfloat16) if kind == "bfloat16" else tensor
    return tensor if device is None else tensor.to(device)


def gathered(rows, stored):
    """Copy the rows into one array: memory lent by the object store cannot be written to."""
    blocks = [block for block, _ in rows]
    if len(set(blocks)) == 1:
        return stored[blocks[0]][[row for _, row in rows]]
    return np.stack([stored[block][row] for block, row in rows])
