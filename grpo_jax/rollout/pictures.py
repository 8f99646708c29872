"""Pictures of a data set: find them, open them lazily with Pillow, and store them."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.errors import one_line, short_name, short_repr

if TYPE_CHECKING:
    import pyarrow
    from PIL.Image import Image
    from torch import Tensor

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are read; some of Pillow's others start programs."""

MARGIN = 0.25
"""Tolerance for floats outside [0, 1] from filters that overshoot; they are clipped."""

_STORED_PIXELS = 128  # longer side of a picture that is stored with a run's completions

_BASE64 = re.compile(r"(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk|SUkq|TU0A)[A-Za-z0-9+/=\s]{40,}")


class File(NamedTuple):
    """A picture's file, and its name in the data set."""

    path: Path
    name: str


Source = Any
"""A picture of a row: a `File`, bytes of one, or in memory: Pillow's, a NumPy or a torch array."""


class RenderedImages(NamedTuple):
    """Pictures of a chunk, torch float [P·G·K, 3, H, W] in [0, 1] on the scorer's device, K for each text.

    `images` is None if rendering failed and on_judge_error is "missing". `baseline_images` are those of the unchanged
    prompts from the same noise, one for each picture; None if no reward needs them.
    """

    images: Tensor | None
    baseline_images: Tensor | None
    per_text: int = 1


def source_of(value: object, base: Path | None) -> Source:
    """Read a data set's value of a picture; raises ValueError. Paths are relative to `base`, None for here.

    It is a path; base64 text or a data URL; bytes; {"bytes": …, "path": …} as in Hugging Face datasets; {"url": …} or
    {"base64": …} as in chat messages; a picture in memory.
    """
    if isinstance(value, Mapping):
        # Prefer bytes to the path, which may belong to another machine.
        held = (value.get(name) for name in ("bytes", "base64", "image", "url", "path"))
        inner = next((entry for entry in held if entry is not None), None)
        if inner is not None:
            return source_of(inner, base)
    if isinstance(value, File):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return _from_text(value, base)
    if isinstance(value, os.PathLike):
        return _file(str(value), base)
    if hasattr(value, "convert") and hasattr(value, "size"):  # a PIL image
        return value
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        _check_array(value)
        return value
    raise ValueError(f"a picture is given as a path, as base64 text or as {{'bytes': …}}, got {short_repr(value, 40)}")


def _from_text(text: str, base: Path | None) -> File | bytes:
    is_url = text.startswith("data:")
    if not is_url and not _BASE64.fullmatch(text):
        return _file(text.removeprefix("file://"), base)
    data = text.partition(",")[2] if is_url else text
    try:
        content = base64.b64decode("".join(data.split()), validate=True)
    except ValueError as error:
        raise ValueError(f"a picture is not valid base64 ({one_line(error, 60)})") from error
    return source_of(content, base)


def _file(name: str, base: Path | None) -> File:
    path = Path(os.path.expanduser(name))
    path = path if base is None or path.is_absolute() else base / path
    if not name or not os.path.isfile(path):
        hint = ": web addresses are not fetched, download them" if "://" in name else ""
        shown = short_name(name if hint else path) if name else "without a name"
        raise ValueError(f"there is no picture {shown}{hint}")
    return File(path.absolute(), name)  # a reward may change the working directory


def _check_array(value: Source) -> None:
    """Refuse shapes other than [H, W] and [H, W, 1 | 3 | 4] for NumPy and JAX, and [3, H, W] for torch."""
    shape, torch = tuple(value.shape), hasattr(value, "detach")
    channels = shape[0 if torch else -1] if len(shape) == 3 else 1
    if len(shape) not in (2, 3) or channels not in (1, 3, 4) or 0 in shape:
        expected = "[3, H, W]" if torch else "[H, W, 3]"
        raise ValueError(f"a picture in memory has the shape {expected}, got {list(shape)}")


def open_picture(source: Source) -> Image:
    """Open a picture with Pillow, upright; ValueError if it is broken, animated, too large or not a picture."""
    from PIL import ImageOps

    if hasattr(source, "shape"):
        return _from_array(source)
    with _opened(source) as picture:
        upright = ImageOps.exif_transpose(picture) if _orientation(picture) != 1 else picture
        upright.load()
        return _to_uint8(upright, picture.format)


def size_of(source: Source) -> tuple[int, int]:
    """Return height and width of a picture, from a file's header; raises as `open_picture`."""
    if hasattr(source, "shape"):
        picture = _from_array(source)
        return picture.height, picture.width
    with _opened(source) as picture:
        sideways = _orientation(picture) >= 5
        _to_uint8(picture, picture.format)  # refuse it when a run starts, not when a batch needs it
        return (picture.width, picture.height) if sideways else (picture.height, picture.width)


@contextmanager
def _opened(source: File | bytes | Image) -> Iterator[Image]:
    """Open an encoded picture with Pillow, which reads its pixels lazily; a Pillow picture stays itself."""
    from PIL import Image

    with _pillow_errors(), source.path.open("rb") if isinstance(source, File) else nullcontext(source) as content:
        stream = io.BytesIO(content) if isinstance(content, bytes) else content
        picture = stream if isinstance(stream, Image.Image) else Image.open(stream, formats=FORMATS)
        _check_still(picture)
        yield picture


@contextmanager
def _pillow_errors() -> Iterator[None]:
    """Convert Pillow's errors and warnings to a ValueError."""
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # 89 million pixels
        try:
            yield
        except _RefusedError:
            raise
        except Exception as error:  # a format's reader may raise any type
            unknown = isinstance(error, UnidentifiedImageError)
            reason = f"no picture that can be read ({', '.join(FORMATS)})"
            raise ValueError(f"it is {reason if unknown else f'broken ({one_line(error, 60)})'}") from error


class _RefusedError(ValueError):
    """A readable picture that a prompt cannot use."""


def _check_still(picture: Image) -> None:
    kind = getattr(picture, "format", None)
    if getattr(picture, "is_animated", False) and kind != "MPO":  # the first frame of a camera's MPO is the picture
        what = "pages" if kind == "TIFF" else "frames"
        count = getattr(picture, "n_frames", "several")
        raise _RefusedError(f"it has {count} {what}, and a prompt takes still pictures: keep one of them")


def _orientation(picture: Image) -> int:
    """Return the EXIF orientation; 1 is upright."""
    from PIL import ExifTags

    if picture.format == "PNG" and "exif" not in picture.info:  # getexif would read the whole file
        return 1
    noted = picture.getexif().get(ExifTags.Base.Orientation, 1)
    return noted if noted in range(1, 9) else 1


def _from_array(array: Source) -> Image:
    from PIL import Image

    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = (array.float() if array.is_floating_point() else array).numpy()
        array = np.moveaxis(array, 0, -1) if array.ndim == 3 else array
    array = eight_bits(np.asarray(array))
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array))


def eight_bits(values: np.ndarray) -> np.ndarray:
    """Convert a picture's values to uint8, scaled from the range of their dtype: all of uint16, [0, 1] for floats."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:
        return ((values.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    kind, values = str(values.dtype), values.astype(np.float32)
    lowest, highest = float(values.min()), float(values.max())
    if "float" not in kind or not (lowest >= -MARGIN and highest <= 1 + MARGIN):  # NaN fails both
        expected = "uint8, uint16 (to 65535) or floats in [0, 1]"
        raise _RefusedError(f"its values are {kind} from {lowest:.4g} to {highest:.4g}: expected {expected}")
    return np.round(np.clip(values, 0, 1) * 255).astype(np.uint8)


def _to_uint8(picture: Image, kind: str | None = None) -> Image:
    """Return a picture with 8 bits per channel; `kind` is its file's format.

    Pillow itself clips 16-bit, 32-bit and float values at 255, which makes them white or black.
    """
    from PIL import Image

    if not picture.mode.startswith(("I", "F")):
        return picture
    values = np.asarray(picture)
    if kind in ("PNG", "PPM") and values.dtype == np.int32:  # Pillow stores some 16-bit files so
        values = values.astype(np.uint16)
    return Image.fromarray(eight_bits(values))


def read_rgb(source: Source) -> Image:
    """Return a picture in RGB on white, as the image processor expects; raises as `open_picture`."""
    from PIL import Image

    picture = open_picture(source)
    with _pillow_errors():
        if "A" in picture.getbands() or picture.info.get("transparency") is not None:
            picture = picture.convert("RGBA")
            white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, picture).convert("RGB")
        return picture.convert("RGB")


def digest(source: Source) -> str:
    """Return a machine-independent key of a picture: the file's name, else a hash of its content."""
    if isinstance(source, File):
        return source.name
    if not isinstance(source, bytes):
        picture = open_picture(source)
        source = b"%d %d " % picture.size + picture.tobytes()
    return hashlib.sha256(source).hexdigest()


def as_text(source: Source) -> str:
    """Return a picture as a string for `source_of`: the file's path, else base64 of its bytes."""
    if isinstance(source, File):
        return str(source.path.absolute())
    return "data:image/png;base64," + base64.b64encode(content_of(source)).decode()


def content_of(source: Source) -> bytes:
    """Return the bytes of a picture's file, or of a PNG file for one in memory; OSError if the file is missing."""
    if isinstance(source, File):
        return source.path.read_bytes()
    return source if isinstance(source, bytes) else png(read_rgb(source))


def png(picture: Image | np.ndarray) -> bytes:
    """Return the PNG bytes of a picture, a PIL image or uint8 [H, W, 3]."""
    from PIL import Image

    buffer = io.BytesIO()
    drawn = Image.fromarray(np.ascontiguousarray(picture)) if isinstance(picture, np.ndarray) else picture
    drawn.save(buffer, format="PNG")
    return buffer.getvalue()


def thumbnail(source: Source, size: int) -> np.ndarray:
    """Return a picture for reports: uint8 [H, W, 3], no side above `size` pixels."""
    picture = read_rgb(source)
    picture.thumbnail((size, size))
    return np.asarray(picture)


def pictures_column(pictures: Sequence[Sequence[Source]]) -> dict[str, pyarrow.Array]:
    """Return the pictures of rows as {"pictures": a column of an Arrow table}; {} if there are none.

    Values are {bytes, path} as in Hugging Face datasets: a file's path, or a small PNG of any other picture.
    """
    import pyarrow

    if not any(pictures):
        return {}

    def stored(source: Source) -> dict[str, bytes | str | None]:
        if isinstance(source, File):
            return {"bytes": None, "path": str(source.path)}
        return {"bytes": png(thumbnail(source, _STORED_PIXELS)), "path": None}

    kind = pyarrow.list_(pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    columns = {id(row): list(map(stored, row)) for row in {id(row): row for row in pictures}.values()}
    return {"pictures": pyarrow.array([columns[id(row)] for row in pictures], kind)}
