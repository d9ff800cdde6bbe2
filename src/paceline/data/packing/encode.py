"""Encode samples for packing: unchanged, resized, decoded, or as a function returns them."""

import io
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..format.decode import (
    DEEP_MODES,
    compress_zstd,
    decode,
    open_image,
    read_image_header,
    shallow_mode,
)
from ..format.meta_schema import DTYPES, MAX_DIMS, MAX_SAMPLE_BYTES, ArraySpec
from ..format.npy import parse_npy
from ..format.sample_names import to_name_line
from ..format.shard_format import FILE, RAW, ZSTD, IndexRow, checksum, pack_row
from ..sources.content import ARRAYS, IMAGES, JPEGS
from ..sources.source import LoadedSample
from .statistics import Statistics

CAST_HINT = ". HINT: --cast to a wider dtype, or --apply a function that clips or scales values"


@dataclass(frozen=True)
class EncodingOptions:
    """How ``pack`` encodes samples.

    Attributes:
        decode: Decode images and pack them as arrays.
        resize: Shrink images to this shorter side in pixels, as JPEGs.
        quality: JPEG quality of resized images, 1 to 100.
        compress: Compress arrays with zstd.
        cast: Cast arrays to this dtype. A value that it can't hold is an error of the sample.
        apply: Function that gets a sample's array (bytes for files that are neither arrays nor
            images) and returns the array to pack instead.
    """

    decode: bool = False
    resize: int | None = None
    quality: int = 90
    compress: bool = False
    cast: str | None = None
    apply: Callable[[Any], Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON values; ``apply`` by its name."""
        return {**asdict(replace(self, apply=None)), "apply": function_name(self.apply)}

    def __post_init__(self) -> None:
        if self.cast is not None:
            try:
                known = np.dtype(self.cast).newbyteorder("=").name in DTYPES
            except (TypeError, ValueError, SyntaxError):
                known = False
            if not known:
                raise ValueError(
                    f"cast (--cast) must be one of {', '.join(DTYPES)}; this is {self.cast!r}. "
                    "HINT: --cast float16"
                )
        if self.apply is not None and (self.decode or self.resize is not None):
            raise ValueError(
                "apply (--apply) can't be combined with decode or resize: the function gets the "
                "decoded sample. HINT: leave out --decode and --resize"
            )
        if self.resize is not None and self.resize < 1:
            raise ValueError(
                f"resize (--resize) must be at least 1 pixel; this is {self.resize}. "
                "HINT: --resize 256 for a shorter side of 256 pixels"
            )
        if not 1 <= self.quality <= 100:
            raise ValueError(
                f"quality (--quality) must be from 1 to 100; this is {self.quality}. "
                "HINT: --quality 90"
            )


@dataclass(slots=True)
class EncodedSample:
    """One sample, ready to be written.

    Attributes:
        encoding: RAW, ZSTD, JPEG, IMAGE or FILE.
        parts: Bytes of the data, then of the label if it is an array.
        length: Bytes of all parts.
        label: Class or integer label; 0 if the label is an array or missing.
        crc: Checksum of the parts, without the row.
        statistics: Statistics of this sample, where they are computed.
    """

    encoding: int
    shape: tuple[int, ...]
    dtype: str
    parts: list[Any]
    length: int
    label: int
    crc: int
    name: str
    statistics: Statistics | None = None

    def row(self, shard: int, offset: int) -> bytes:
        """Return the sample's row in the index. offset: bytes from the start of the shard."""
        place = (self.label, offset, self.length, shard)
        covered = pack_row(*place, self.shape, self.dtype, self.encoding)
        return covered + checksum(covered, start=self.crc).to_bytes(4, "little")


def encode_sample(
    loaded: LoadedSample, options: EncodingOptions, label: ArraySpec | str | None
) -> EncodedSample:
    """Encode a sample. label: the dataset's label kind, "class", or None.

    Raises ValueError if the sample can't be packed or its label differs in shape from the others.
    """
    encoding, shape, dtype, data = _encode_data(loaded, options)
    parts, number, length = [data], 0, len(data)
    if isinstance(label, ArraySpec):
        array = np.asarray(loaded.label)
        if array.shape != label.shape:
            raise ValueError(
                f"its label has the shape {array.shape}, but others have {label.shape}"
            )
        if not np.can_cast(array.dtype, label.dtype, "safe"):
            raise ValueError(f"its label is {array.dtype}, but others are {label.dtype}")
        array = np.asarray(array, label.dtype, order="C")
        parts.append(array.tobytes())
        length += len(parts[1])
    elif label is not None:
        try:
            number = operator.index(loaded.label)
        except TypeError:
            raise ValueError(
                f"its label is {_shown_label(loaded.label)}, but others are integers"
            ) from None
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"its label {str(number)[:20]} ... does not fit into 64 bits")
    if length >= MAX_SAMPLE_BYTES:
        raise ValueError("has 4 GiB or more. HINT: cut it into patches")
    crc = checksum(b"", *parts)
    return EncodedSample(
        encoding, shape, dtype, parts, length, number, crc, to_name_line(loaded.name)
    )


def _shown_label(label: Any) -> str:
    array = np.asarray(label)
    return f"{array.dtype} of {array.shape}" if array.shape else f"{array.dtype} {array}"[:80]


def _encode_data(
    loaded: LoadedSample, options: EncodingOptions
) -> tuple[int, tuple[int, ...], str, Any]:
    data = loaded.data
    if options.apply is not None:
        return _encode_array(_apply(options.apply, load_array(loaded)), options)
    if isinstance(data, np.ndarray):
        return _encode_array(data, options)
    if loaded.extension in ARRAYS:
        return _encode_array(parse_npy(data), options)
    if loaded.extension not in IMAGES:
        if not data:
            raise ValueError("is empty (0 bytes)")
        return FILE, (), "uint8", data
    encoding, shape, dtype = read_image_header(data, loaded.extension in JPEGS)
    if options.resize is not None and min(shape[:2]) > options.resize:
        data = _resize_jpeg(data, options.resize, options.quality)
        encoding, shape, dtype = read_image_header(data, True)
    if options.decode:
        row = IndexRow(0, 0, len(data), 0, shape, dtype, encoding, 0, b"")
        return _encode_array(decode(row, data), options)
    return encoding, shape, dtype, data


def load_array(loaded: LoadedSample) -> Any:
    """Return a sample's array, decoded and writable.

    For a file that is neither an array nor an image, return its bytes.

    Raises:
        ValueError: The sample can't be decoded.
    """
    data = parse_npy(loaded.data) if loaded.extension in ARRAYS else loaded.data
    if isinstance(data, np.ndarray):
        return data if data.flags.writeable else data.copy()
    if loaded.extension not in IMAGES:
        return data
    encoding, shape, dtype = read_image_header(data, loaded.extension in JPEGS)
    return decode(IndexRow(0, 0, len(data), 0, shape, dtype, encoding, 0, b""), data)


def function_name(function: Callable[..., Any] | None) -> str | None:
    """Return "MODULE:QUALNAME" of a function or, for a callable object, of its class.

    Unlike ``repr``, the name contains no memory address, so it is the same in each process.
    """
    if function is None:
        return None
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


def _apply(function: Callable[[Any], Any], data: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(function(data))
    except Exception as error:
        raise ValueError(
            f"apply {function_name(function)}: {type(error).__name__}: {error}"
        ) from error


def _encode_array(
    array: np.ndarray[Any, Any], options: EncodingOptions
) -> tuple[int, tuple[int, ...], str, Any]:
    if array.dtype.hasobject or array.dtype.kind not in "biufc":
        raise ValueError(f"is an array of {array.dtype}, which is not numeric")
    kind = np.dtype(options.cast or array.dtype).newbyteorder("=")
    if kind.name not in DTYPES:
        raise ValueError(
            f"is an array of {kind}; the dtype must be {', '.join(DTYPES)}. HINT: --cast float32"
        )
    if array.ndim > MAX_DIMS or max(array.shape, default=0) >= 1 << 32:
        raise ValueError(f"has the shape {array.shape}: too many dimensions, or one is too long")
    if array.size * kind.itemsize >= MAX_SAMPLE_BYTES:
        raise ValueError("has 4 GiB or more. HINT: cut it into patches")
    array = np.asarray(array if kind == array.dtype else _cast(array, kind), order="C")
    if options.compress:
        return ZSTD, array.shape, kind.name, compress_zstd(array)
    return RAW, array.shape, kind.name, _array_bytes(array)


def _array_bytes(array: np.ndarray[Any, Any]) -> Any:
    """Return the bytes of a C-ordered array: a view if the memory is immutable, else a copy.

    A mutable array could be changed before it is written.
    """
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if isinstance(owner.base, bytes) and array.size:
        return array.reshape(-1).view(np.uint8).data
    return array.tobytes()


def _cast(array: np.ndarray[Any, Any], kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the array in another dtype. Fractions are cut for integers, else values are rounded.

    Raises:
        ValueError: The dtype can't hold a value: it would wrap around, become infinite, or lose
            its imaginary part. NaN has no integer.
    """
    if array.dtype.kind == "c" and kind.kind not in "cb":
        _check_values(array, array.imag == 0, kind)
        array = array.real
    if kind.kind in "iu" and array.size:
        limits = np.iinfo(kind)
        low, high = array.min().item(), array.max().item()  # Python compares these exactly
        if not (low >= limits.min and high <= limits.max):
            raise ValueError(f"has values from {low} to {high}, which {kind} can't hold{CAST_HINT}")
    with np.errstate(over="ignore"):
        made = array.astype(kind)
    if kind.kind in "fc" and not np.isfinite(made).all():
        _check_values(array, np.isfinite(made) | ~np.isfinite(array), kind)
    return made


def _check_values(array: np.ndarray[Any, Any], fits: Any, kind: np.dtype[Any]) -> None:
    """Raise ValueError with the first value for which ``fits`` is false."""
    if not np.all(fits):
        place = tuple(int(i) for i in np.argwhere(~fits)[0])
        value = array[place].item()
        raise ValueError(f"has at {place} the value {value}, which {kind} can't hold{CAST_HINT}")


def _resize_jpeg(data: Any, side: int, quality: int) -> bytes:
    image = open_image(data)
    if image.mode in DEEP_MODES:
        raise ValueError(
            f"has {DEEP_MODES[image.mode]} values, and a resized image is a JPEG, which has 8 bits "
            "in a value. HINT: replace --resize by --apply MODULE:FUNCTION, which resizes arrays"
        )
    image.draft(image.mode, (side, side))  # a JPEG is decoded at a fraction of its size
    width, height = image.size
    scale = side / min(width, height)
    try:
        image = image.convert(shallow_mode(image))
        if scale < 1:
            image = image.resize((round(width * scale), round(height * scale)), reducing_gap=2)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
    except Exception as error:  # Pillow's plugins raise exceptions of any type for damaged files
        raise ValueError(f"can't be decoded: {error}") from None
    return buffer.getvalue()


def decoded_array(packed: EncodedSample) -> Any:
    """Return the decoded array of a sample; None for a file that is neither array nor image."""
    if packed.encoding == FILE:
        return None
    row = IndexRow(0, 0, packed.length, 0, packed.shape, packed.dtype, packed.encoding, 0, b"")
    return decode(row, packed.parts[0])
