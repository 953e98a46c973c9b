"""Turn the bytes of a field into a picture, a number, an array or text; by one rule, wherever the bytes came from."""

from __future__ import annotations

import io
import json as _json
import struct
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bucketfeed.errors import ConfigError, DecodeError
from bucketfeed.store.ranges import Buffer

_ORIENTATION = 0x0112  # the EXIF tag


def image(data: Buffer, mode: Literal["RGB", "RGBA", "L"] | None = "RGB") -> NDArray[Any]:
    """Return the picture as an array of height x width x channels, upright as its EXIF orientation says.

    `mode` "RGB", "RGBA" or "L" gives uint8 with 3, 4 or 1 channels, whatever is stored:

    - a grey value goes into all colours, a palette's index becomes its colour, 1-bit pictures become 0 and 255;
    - transparency is dropped, not blended with a background ("RGBA" keeps it, 255 where there is none);
    - 16-bit grey v becomes round(v / 257);
    - 16-bit colour is cut to its high 8 bits, since Pillow opens it so;
    - CMYK is turned into RGB by the plain formula, without a colour profile;
    - of an animation the first frame is taken.

    `mode` None keeps what is stored: 16-bit grey as uint16, 32-bit integers and floats as int32 and float32, 8-bit
    channels as they are; only palettes and 1-bit pictures are expanded as above, to RGB (RGBA where a palette is
    transparent) and one channel.

    Raises `DecodeError` for anything but a whole picture.
    """
    from PIL import Image, UnidentifiedImageError

    if mode not in ("RGB", "RGBA", "L", None):
        raise ConfigError(f"mode must be 'RGB', 'RGBA', 'L' or None, not {mode!r}")
    try:
        picture = Image.open(io.BytesIO(data))
        picture.load()
        pixels = _pixels(_upright(picture), mode)
    except DecodeError:
        raise
    except UnidentifiedImageError as e:  # its text names a buffer's address
        raise _not(data, "a picture", "no format that Pillow knows") from e
    except (OSError, ValueError, SyntaxError, TypeError, EOFError, struct.error, Image.DecompressionBombError) as e:
        raise _not(data, "a whole picture", e) from e
    return pixels if pixels.ndim == 3 else pixels[:, :, np.newaxis]


def json(data: Buffer) -> Any:
    """Return the value of a JSON text in UTF-8, with or without a byte order mark. Raises `DecodeError`."""
    try:
        return _json.loads(text(data))
    except _json.JSONDecodeError as e:
        raise _not(data, "JSON", e) from e


def text(data: Buffer) -> str:
    """Return UTF-8 text, without its byte order mark. Raises `DecodeError`."""
    try:
        return str(data, "utf-8-sig")
    except UnicodeDecodeError as e:
        raise _not(data, "UTF-8 text", e) from e


def cls(data: Buffer) -> int:
    """Return the whole number that is written in decimal digits, as WebDataset's `cls`. Raises `DecodeError`."""
    try:
        return int(bytes(data))
    except ValueError as e:
        raise _not(data, "a class number in decimal digits", e) from e


def npy(data: Buffer) -> NDArray[Any]:
    """Return the array of a NumPy .npy file, in this machine's byte order; pickled objects are refused.

    Raises `DecodeError`.
    """
    try:
        array: NDArray[Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, TypeError, EOFError, OSError, MemoryError) as e:
        raise _not(data, "a whole .npy file", e) from e
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


_DECODERS = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff"), image),
    "json": json,
    "txt": text,
    "cls": cls,
    "npy": npy,
}


def auto(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample with its fields decoded by extension: what follows the last dot of their names.

    jpg, jpeg, png, webp, bmp, tif, tiff become RGB arrays by `image`; json, txt, cls and npy what those functions
    give; all others stay bytes. Raises `DecodeError`, which names the field.
    """
    return {field: _decoded(field, value) for field, value in sample.items()}


def _decoded(field: str, value: Any) -> Any:
    decode = _DECODERS.get(field.rpartition(".")[2])
    if decode is None or not isinstance(value, bytes | memoryview):
        return value
    try:
        return decode(value)
    except DecodeError as e:
        raise DecodeError(f"field {field!r}: {e}") from e


def _upright(picture: Any) -> Any:
    """Return the picture turned and flipped as its EXIF orientation says; a damaged EXIF block says nothing."""
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(picture.getexif().get(_ORIENTATION))
    except (SyntaxError, ValueError, TypeError, KeyError, OSError, struct.error):
        return picture
    return picture if turn is None else picture.transpose(turn)


def _pixels(picture: Any, mode: str | None) -> NDArray[Any]:
    if picture.mode.startswith("I;16"):
        grey = np.array(picture).astype(np.uint16)  # native, whatever the file's byte order
        if mode is None:
            return grey
        return _of_grey((grey.astype(np.uint32) + 128) // 257, mode)
    if mode is None:
        if picture.mode in ("P", "PA"):
            return np.array(picture.convert("RGBA" if picture.has_transparency_data else "RGB"))
        return np.array(picture.convert("L") if picture.mode == "1" else picture)
    if picture.mode in ("I", "F"):
        raise DecodeError(
            f"picture of mode {picture.mode!r}: its values have no agreed range to scale to {mode}; pass mode=None for "
            "the values as they are"
        )
    if picture.mode in ("LAB", "HSV"):
        picture = picture.convert("RGB")  # the only way from there
    return np.array(picture if picture.mode == mode else picture.convert(mode))


def _of_grey(values: NDArray[np.uint32], mode: str) -> NDArray[np.uint8]:
    grey = values.astype(np.uint8)
    if mode == "L":
        return grey
    opaque = (np.full_like(grey, 255),) if mode == "RGBA" else ()
    return np.stack((grey, grey, grey, *opaque), axis=-1)


def _not(data: Buffer, what: str, cause: Exception | str) -> DecodeError:
    start = f"{len(data)} bytes that start with {bytes(data[:16])!r}" if len(data) else "0 bytes"
    return DecodeError(f"not {what} ({start}): {cause}")
