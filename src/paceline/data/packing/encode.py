"""What a sample becomes when it is packed: its bytes as they are, made smaller, decoded, or what a
function makes of it."""

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..format.decode import compress_zstd, decode, open_image, parse_npy, read_image_header
from ..format.meta_schema import DTYPES, MAX_DIMS, MAX_SAMPLE_BYTES
from ..format.sample_names import to_name_line
from ..format.shard_format import FILE, RAW, ZSTD, ArraySpec, IndexRow, checksum, pack_row
from ..sources.source import ARRAYS, IMAGES, JPEGS, Loaded
from .statistics import Statistics


@dataclass(frozen=True)
class Encoding:
    """decode: images as arrays. resize: images' shorter side in pixels, as JPEGs of ``quality``.
    compress: arrays with zstd. cast: arrays' dtype. apply: of a sample's array (or bytes, of files
    of other kinds), the array that is packed in its place."""

    decode: bool = False
    resize: int | None = None
    quality: int = 90
    compress: bool = False
    cast: str | None = None
    apply: Callable[[Any], Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """apply: by its name."""
        return {**asdict(replace(self, apply=None)), "apply": named(self.apply)}

    def __post_init__(self) -> None:
        if self.cast is not None:
            try:
                np.dtype(self.cast)
            except TypeError:
                raise ValueError(
                    f"cast={self.cast!r} is no dtype. HINT: float16, uint8 ..."
                ) from None
        if self.apply is not None and (self.decode or self.resize is not None):
            raise ValueError(
                "apply gets the decoded sample as it is. HINT: without decode and resize"
            )
        if self.resize is not None and self.resize < 1:
            raise ValueError(f"resize={self.resize}: HINT: the shorter side in pixels, as 256")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality={self.quality}: HINT: 1 to 100, as JPEG has it")


@dataclass(slots=True)
class Packed:
    """One sample, ready to be written. length: bytes. crc: of its bytes, without its row.
    statistics: of this one, where they are taken."""

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
        """Its row at a place."""
        place = (self.label, offset, self.length, shard)
        covered = pack_row(*place, self.shape, self.dtype, self.encoding)
        return covered + checksum(covered, start=self.crc).to_bytes(4, "little")


def encoded(loaded: Loaded, how: Encoding, label: ArraySpec | str | None) -> Packed:
    """Raises ValueError where a sample, or its label, is not what it is said to be."""
    encoding, shape, dtype, data = _encoded(loaded, how)
    parts, number, length = [data], 0, len(data)
    if isinstance(label, ArraySpec):
        array = np.asarray(loaded.label, label.dtype, order="C")
        if array.shape != label.shape:
            raise ValueError(f"its label is {array.shape}, and others are {label.shape}")
        parts.append(array.tobytes())
        length += len(parts[1])
    elif label is not None:
        number = int(loaded.label)
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"its label {str(number)[:20]} ... does not fit into 64 bits")
    if length >= MAX_SAMPLE_BYTES:
        raise ValueError("has 4 GiB or more. HINT: cut it into patches")
    crc = checksum(b"", *parts)
    return Packed(encoding, shape, dtype, parts, length, number, crc, to_name_line(loaded.name))


def _encoded(loaded: Loaded, how: Encoding) -> tuple[int, tuple[int, ...], str, Any]:
    data = loaded.data
    if how.apply is not None:
        return _of_array(_applied(how.apply, array_of(loaded)), how)
    if isinstance(data, np.ndarray):
        return _of_array(data, how)
    if loaded.end in ARRAYS:
        return _of_array(parse_npy(data), how)
    if loaded.end not in IMAGES:
        if not data:
            raise ValueError("is empty: no byte of it is there")
        return FILE, (), "uint8", data
    encoding, shape, dtype = read_image_header(data, loaded.end in JPEGS)
    if how.resize is not None and min(shape[:2]) > how.resize:
        data = _smaller(data, how.resize, how.quality)
        encoding, shape, dtype = read_image_header(data, True)
    if how.decode:
        row = IndexRow(0, 0, len(data), 0, shape, dtype, encoding, 0, b"")
        return _of_array(decode(row, data), how)
    return encoding, shape, dtype, data


def array_of(loaded: Loaded) -> Any:
    """Return a sample's array, decoded and writable; bytes of a file of another kind. Raises
    ValueError."""
    data = parse_npy(loaded.data) if loaded.end in ARRAYS and _is_file(loaded) else loaded.data
    if isinstance(data, np.ndarray):
        return data if data.flags.writeable else data.copy()
    if loaded.end not in IMAGES:
        return data
    encoding, shape, dtype = read_image_header(data, loaded.end in JPEGS)
    return decode(IndexRow(0, 0, len(data), 0, shape, dtype, encoding, 0, b""), data)


def _is_file(loaded: Loaded) -> bool:
    return not isinstance(loaded.data, np.ndarray)


def named(function: Callable[..., Any] | None) -> str | None:
    """ "MODULE:FUNCTION", or as an object calls itself, without where it lies in memory."""
    if function is None:
        return None
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


def _applied(function: Callable[[Any], Any], data: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(function(data))
    except Exception as error:
        raise ValueError(f"apply {named(function)}: {type(error).__name__}: {error}") from error


def _of_array(array: np.ndarray[Any, Any], how: Encoding) -> tuple[int, tuple[int, ...], str, Any]:
    if array.dtype.hasobject or array.dtype.kind not in "biufc":
        raise ValueError(f"is an array of {array.dtype}, not of numbers")
    kind = np.dtype(how.cast or array.dtype).newbyteorder("=")
    if kind.name not in DTYPES:
        raise ValueError(f"is an array of {kind}, and packed are {', '.join(DTYPES)}. HINT: --cast")
    if array.ndim > MAX_DIMS or max(array.shape, default=0) >= 1 << 32:
        raise ValueError(f"is an array of {array.shape}: too many dims, or too long a side")
    if array.size * kind.itemsize >= MAX_SAMPLE_BYTES:
        raise ValueError("has 4 GiB or more. HINT: cut it into patches")
    if kind.kind in "iu" and kind != array.dtype:
        _fits(array, kind)
    array = np.asarray(array, kind, order="C")
    if how.compress:
        return ZSTD, array.shape, kind.name, compress_zstd(array)
    return RAW, array.shape, kind.name, _bytes(array)


def _bytes(array: np.ndarray[Any, Any]) -> Any:
    """A C-ordered array's. Where they are, if nobody can write there before they are packed."""
    held = array
    while isinstance(held.base, np.ndarray):
        held = held.base
    if isinstance(held.base, bytes) and array.size:
        return array.reshape(-1).view(np.uint8).data
    return array.tobytes()


def _fits(array: np.ndarray[Any, Any], kind: np.dtype[Any]) -> None:
    """A cast to whole numbers must not wrap around."""
    limits = np.iinfo(kind)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ValueError(
            f"has values from {array.min()} to {array.max()}, which {kind} can't hold. "
            "HINT: --cast to a wider dtype"
        )


def _smaller(data: Any, side: int, quality: int) -> bytes:
    picture = open_image(data)
    picture.draft(picture.mode, (side, side))  # a JPEG is decoded at a fraction of its size
    width, height = picture.size
    scale = side / min(width, height)
    try:
        picture = picture.convert("L" if picture.mode == "L" else "RGB")
        if scale < 1:
            picture = picture.resize((round(width * scale), round(height * scale)), reducing_gap=2)
        made = io.BytesIO()
        picture.save(made, "JPEG", quality=quality)
    except Exception as error:  # Pillow's plugins raise whatever a damaged file leads them to
        raise ValueError(f"does not decode: {error}") from None
    return made.getvalue()


def values(packed: Packed) -> Any:
    """The array of a packed sample, as a reader will have it; None of a file of another kind."""
    if packed.encoding == FILE:
        return None
    row = IndexRow(0, 0, packed.length, 0, packed.shape, packed.dtype, packed.encoding, 0, b"")
    return decode(row, packed.parts[0])
