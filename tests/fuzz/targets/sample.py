"""The bytes of one sample: zstd, JPEG, PNG and other images, .npy.

Input: the encoding, the sides of the image or array that the row states, then the bytes.
"""

import io
from collections.abc import Iterator

import numpy as np
import zstandard
from PIL import Image

from paceline.data.format import decode as decoding
from paceline.data.format import meta_schema
from paceline.data.format.meta_schema import DTYPES, nbytes
from paceline.data.format.shard_format import IMAGE, JPEG, RAW, ZSTD, IndexRow
from paceline.data.packing.encode import EncodingOptions, encode_sample
from paceline.data.sources.source import LoadedSample

decoding.MAX_IMAGE_PIXELS = 1 << 16
decoding.MAX_UNCHECKED_SCAN_WORK = 1 << 20
MAX_BYTES = meta_schema.MAX_SAMPLE_BYTES = decoding.MAX_SAMPLE_BYTES = 1 << 20
KINDS = (RAW, ZSTD, JPEG, IMAGE)
ENDS = (".jpg", ".png", ".npy", ".tif")


def seeds() -> Iterator[bytes]:
    pixels = np.arange(12 * 8 * 3, dtype=np.uint8).reshape(12, 8, 3)
    for number, kind in enumerate(("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000")):
        made = io.BytesIO()
        try:
            Image.fromarray(pixels).save(made, kind)
        except (KeyError, OSError):  # Pillow was built without it
            continue
        yield bytes([2 if number == 0 else 3, 12, 8, 0, number % 4]) + made.getvalue()
    made = io.BytesIO()
    Image.fromarray(pixels).save(made, "JPEG", progressive=True)
    yield bytes([2, 12, 8, 0, 0]) + made.getvalue()
    yield bytes([1, 12, 8, 0, 0]) + zstandard.compress(pixels.tobytes())
    made = io.BytesIO()
    np.save(made, pixels)
    yield bytes([0, 12, 8, 9, 2]) + made.getvalue()


def run(data: bytes) -> None:
    if len(data) < 6:
        return
    kind, height, width = KINDS[data[0] % 4], data[1], data[2]
    images = kind in (JPEG, IMAGE)
    dtype = "uint8" if images else DTYPES[data[3] % len(DTYPES)]
    shape = (height, width, 3 if data[3] < 128 else 1)
    content = memoryview(data)[5:]
    row = IndexRow(0, 0, len(content), 0, shape, dtype, kind, 0, b"")
    array = _tried(decoding.decode, row, content)
    if array is not None:
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.nbytes == nbytes(dtype, shape)
    into = np.zeros(shape, dtype)
    _tried(decoding.decode, row, content, into)
    # as for a file in a folder that is packed
    loaded = LoadedSample(bytes(content), None, f"x{ENDS[data[4] % len(ENDS)]}")
    _tried(encode_sample, loaded, EncodingOptions(decode=data[4] > 128), None)


def _tried(function, *words):
    try:
        return function(*words)
    except (
        ValueError,
        ArithmeticError,
        MemoryError,
    ):  # as Shards.decoded and Encoder.one handle them
        return None
