"""Decode samples to arrays, read parts of arrays, and read the headers of images for packing.

The decoders release the GIL, so threads decode in parallel.
"""

import functools
import importlib
import io
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .meta_schema import MAX_SAMPLE_BYTES, ArraySpec, nbytes
from .shard_format import FILE, IMAGE, JPEG, RAW, ZSTD, IndexRow

Bytes = Any  # any object that supports the buffer protocol
JPEG_COLOUR_SPACES = {1: "GRAY", 3: "RGB"}
# Dtypes of images with more than 8 bits in a value, by Pillow's mode. Pillow clips them if it
# converts them to L or RGB.
DEEP_MODES = {
    **dict.fromkeys(("I;16", "I;16L", "I;16B", "I;16N"), "uint16"),
    "I": "int32",
    "F": "float32",
}
MIN_RUN_BYTES = 1 << 15  # shorter runs of bytes take longer than what lies between them
TIFF_BITS, TIFF_SAMPLE_FORMAT, TIFF_SUBFILE = 258, 339, 254  # tags
TIFF_UNSIGNED, TIFF_REDUCED = 1, 1
MAX_IMAGE_PIXELS = 1 << 28  # larger images are not training data, and are rejected
# Pillow's other formats run programs (EPS), or do not match any file name in sources.IMAGES.
PILLOW_PLUGINS = ("Jpeg", "Png", "Bmp", "Tiff", "WebP", "Gif", "Ppm", "Jpeg2K")
PILLOW_FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF", "PPM", "JPEG2000")
JPEG_SCAN_MARKER = b"\xff\xda"
MAX_SCANS = 100  # progressive JPEGs have about ten; each scan decodes all pixels again
# Bytes x pixels; above it, decoding many scans may take more than a second.
MAX_UNCHECKED_SCAN_WORK = 10_000_000_000


def decode(row: IndexRow, data: Bytes, into: np.ndarray[Any, Any] | None = None) -> Any:
    """Return the decoded array of a sample.

    The header of the data is compared with the row before memory is allocated for the array.

    Args:
        row: Row of the index.
        data: Bytes of the sample, without those of its label.
        into: Array of the row's shape and dtype, in C order, to decode into.

    Returns:
        ``into`` if given, else a new array. Images have the shape (height, width, channels). Files
        of an unknown kind are returned as bytes.

    Raises:
        ValueError: The data can't be decoded, or does not match the row.
    """
    if row.encoding == FILE:
        return bytes(data)
    array = _DECODERS[row.encoding](row, data, into)
    if array.shape != row.shape or array.dtype != row.dtype:
        raise ValueError(
            f"is {array.dtype} of {array.shape}, but its row says {row.dtype} of {row.shape}"
        )
    if into is None or np.may_share_memory(array, into):
        return array
    into[...] = array
    return into


def _raw(row: IndexRow, data: Bytes, into: Any) -> Any:
    count = math.prod(row.shape)
    if count * np.dtype(row.dtype).itemsize != len(data):
        raise ValueError(
            f"has {len(data):,} bytes, which is not the size of {row.dtype} of {row.shape}"
        )
    return np.frombuffer(data, row.dtype, count).reshape(row.shape)


def _zstd(row: IndexRow, data: Bytes, into: Any) -> Any:
    size = nbytes(row.dtype, row.shape)
    zstandard = import_optional("zstandard")
    try:
        stored_size = zstandard.frame_content_size(data)
        if stored_size not in (size, -1):  # -1: unknown; at most ``size`` bytes are decompressed
            raise ValueError(f"decompresses to {stored_size:,} bytes, but its row says {size:,}")
        if size > MAX_SAMPLE_BYTES:
            raise ValueError(f"decompresses to {size:,} bytes; the maximum is {MAX_SAMPLE_BYTES:,}")
        whole = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ValueError(f"can't be decompressed: {error}") from None
    return _raw(row, whole, into)


def _jpeg(row: IndexRow, data: Bytes, into: Any) -> Any:
    fast = import_simplejpeg()
    if fast is None:
        return _image(row, data, into)
    height, width, channels = row.shape
    if len(data) * height * width > MAX_UNCHECKED_SCAN_WORK:
        _check_scans(data)
    if into is None:  # else the decoder rejects an image that is larger than ``into``
        _same_sides(row, *fast.decode_jpeg_header(data)[:2])
    buffer = None if into is None else into.reshape(-1)
    return fast.decode_jpeg(data, JPEG_COLOUR_SPACES[channels], buffer=buffer)


def _image(row: IndexRow, data: Bytes, into: Any) -> Any:
    picture = open_image(data)
    _same_sides(row, picture.height, picture.width)
    return image_to_array(picture)


def _same_sides(row: IndexRow, height: int, width: int) -> None:
    """Compare the header of an image with its row before memory is allocated for the pixels."""
    if (height, width) != row.shape[:2]:
        raise ValueError(f"is an image of {(height, width)}, but its row says {row.shape}")


def _check_scans(data: Bytes) -> None:
    scans = bytes(data).count(JPEG_SCAN_MARKER)
    if scans > MAX_SCANS:
        raise ValueError(f"is a JPEG of {scans:,} scans; the maximum is {MAX_SCANS}")


def image_to_array(picture: Any) -> np.ndarray[Any, Any]:
    """Return a PIL image as an array (height, width, channels).

    Raises:
        ValueError: The image can't be decoded.
    """
    dtype = _image_dtype(picture)
    mode = picture.mode if picture.mode in DEEP_MODES else shallow_mode(picture)
    try:
        array = np.asarray(picture if picture.mode == mode else picture.convert(mode))
    except Exception as error:  # Pillow's plugins may raise anything for a corrupted file
        raise ValueError(f"can't be decoded: {_words(error)}") from None
    if array.dtype != dtype:  # big endian, or unsigned values of 32 bits in an int32
        array = array.astype(dtype)
    return array if array.ndim == 3 else array[:, :, None]


def shallow_mode(picture: Any) -> str:
    """Return the mode in which an image of 8 bits in a value is used: L or RGB."""
    return "L" if picture.mode in ("1", "L") else "RGB"


def _image_dtype(picture: Any) -> str:
    if picture.mode == "I" and picture.format == "TIFF":  # Pillow reads uint32 as int32
        tags = picture.tag_v2
        unsigned = tags.get(TIFF_SAMPLE_FORMAT, (TIFF_UNSIGNED,)) == (TIFF_UNSIGNED,)
        if unsigned and tags.get(TIFF_BITS) == (32,):
            return "uint32"
    return DEEP_MODES.get(picture.mode, "uint8")


def _check_pages(picture: Any) -> None:
    """Raise ValueError for a TIFF of several images, of which only the first would be used. Smaller
    copies of the first image are not counted."""
    if picture.format != "TIFF":
        return
    size = picture.size
    try:
        picture.seek(1)
        same = picture.size == size and not picture.tag_v2.get(TIFF_SUBFILE, 0) & TIFF_REDUCED
        picture.seek(0)
    except EOFError:
        return
    except Exception as error:  # Pillow's plugins may raise anything for a corrupted file
        raise ValueError(f"can't be opened as an image: {_words(error)}") from None
    if same:
        raise ValueError(
            f"is a TIFF of {picture.n_frames} images, of which only the first would be used. HINT: "
            "use MODULE:FUNCTION as SOURCE, which yields arrays"
        )


def open_image(data: Bytes) -> Any:
    """Open an image with PIL, which reads only the header.

    Raises:
        ValueError: The data is not an image of a supported format, or the image is too large.
    """
    package, formats = _pillow()
    try:
        picture = package.open(io.BytesIO(data), formats=formats)
    except Exception as error:  # Pillow's plugins may raise anything for a corrupted file
        raise ValueError(f"can't be opened as an image: {_words(error)}") from None
    pixels = picture.width * picture.height
    if pixels > MAX_IMAGE_PIXELS:
        raise ValueError(f"claims {picture.width} x {picture.height} pixels")
    if len(data) * pixels > MAX_UNCHECKED_SCAN_WORK and picture.format in ("JPEG", "MPO"):
        _check_scans(data)
    return picture


@functools.cache
def _pillow() -> tuple[Any, tuple[str, ...]]:
    """Return PIL.Image and the names in PILLOW_FORMATS that this build of Pillow supports."""
    package = import_optional("PIL.Image", "pillow")
    for name in PILLOW_PLUGINS:
        importlib.import_module(f"PIL.{name}ImagePlugin")
    return package, tuple(name for name in PILLOW_FORMATS if name in package.OPEN)


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_image_header(data: Bytes, jpeg: bool) -> tuple[int, tuple[int, ...], str]:
    """Return the encoding, shape and dtype of an image file, from its header.

    Raises:
        ValueError: The data is not a supported image, or the image is too large.
    """
    fast = import_simplejpeg() if jpeg else None
    if fast is not None:
        height, width, colours, _ = fast.decode_jpeg_header(data)
        if height * width > MAX_IMAGE_PIXELS:
            raise ValueError(f"claims {width} x {height} pixels")
        if colours in ("Gray", "GRAY", "YCbCr", "RGB"):
            return JPEG, (height, width, 1 if colours.upper() == "GRAY" else 3), "uint8"
    picture = open_image(data)
    _check_pages(picture)
    channels = 1 if picture.mode in DEEP_MODES or shallow_mode(picture) == "L" else 3
    return IMAGE, (picture.height, picture.width, channels), _image_dtype(picture)


@functools.cache
def import_simplejpeg() -> Any:
    """Return simplejpeg, the fastest decoder, or None if it is not installed (PIL decodes then)."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def import_optional(module: str, name: str = "", extra: str = "data") -> Any:
    """Import and return an optional package.

    Raises:
        ValueError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"needs {name or module}, which is not installed. HINT: pip install 'paceline[{extra}]'"
        ) from None


def compress_zstd(array: np.ndarray[Any, Any], level: int = 3) -> bytes:
    """Return the bytes of a C-ordered array, compressed with zstd."""
    made: bytes = import_optional("zstandard").ZstdCompressor(level).compress(array.tobytes())
    return made


def read_part(
    file: int, offset: int, array: ArraySpec, part: Sequence[slice] | None
) -> np.ndarray[Any, Any]:
    """Return a part of an array that a file has in C order as a copy, without reading all of it.

    Args:
        file: Descriptor.
        offset: Of the array in the file, in bytes.
        part: Slices with step 1 for all dims; None: the whole array.

    Raises:
        ValueError: The file ends before.
        OSError: The file can't be read.
    """
    shape = array.shape
    if not shape:  # one number
        number = _read_run(file, offset, np.dtype(array.dtype).itemsize)
        return np.frombuffer(number, array.dtype).reshape(())
    slices = part or (slice(None),) * len(shape)
    bounds = [part.indices(n)[:2] for part, n in zip(slices, shape, strict=True)]
    counts = [max(stop - start, 0) for start, stop in bounds]
    found = np.empty(counts, array.dtype)
    if not found.size:
        return found
    strides = [math.prod(shape[dim + 1 :]) * found.itemsize for dim in range(len(shape))]
    level = _run_dim(counts, shape, strides)
    inner = (slice(None), *(slice(*bound) for bound in bounds[level + 1 :]))
    for index in itertools.product(*map(range, counts[:level])):
        at = offset + bounds[level][0] * strides[level]
        at += sum(
            (start + i) * stride
            for (start, _), i, stride in zip(bounds, index, strides, strict=False)
        )
        run = _read_run(file, at, counts[level] * strides[level])
        block = np.frombuffer(run, array.dtype).reshape(counts[level], *shape[level + 1 :])
        found[index] = block[inner]
    return found


def _run_dim(counts: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the dim whose rows are read at once, with all of the dims after it."""
    divided = [dim for dim, (count, n) in enumerate(zip(counts, shape, strict=True)) if count < n]
    dim = max(divided, default=0)
    while dim and counts[dim] * strides[dim] < MIN_RUN_BYTES:
        dim -= 1
    return dim


def _read_run(file: int, offset: int, size: int) -> bytearray:
    run = bytearray(size)
    left = memoryview(run)
    while len(left):
        done = os.preadv(file, [left], offset)
        if not done:
            raise ValueError("the shard is truncated")
        left, offset = left[done:], offset + done
    return run


_DECODERS: dict[int, Callable[[IndexRow, Bytes, Any], Any]] = {
    RAW: _raw,
    ZSTD: _zstd,
    JPEG: _jpeg,
    IMAGE: _image,
}
