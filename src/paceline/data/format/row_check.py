"""Check that the array in a row of the index is valid in the dataset, before memory is allocated.

The checksum of a row detects corruption. It does not authenticate the row.
"""

from collections.abc import Callable

from .meta_schema import MAX_SAMPLE_BYTES, nbytes
from .shard_format import IMAGE, JPEG, META_FILE, RAW, DatasetMeta, IndexRow


def make_row_check(meta: DatasetMeta) -> Callable[[IndexRow], None]:
    """Return a function that checks one row of the index.

    The function raises ValueError if the row contradicts paceline.json or the length of its sample.
    """
    alike, tail = meta.array, meta.tail
    sizes = [shard.bytes for shard in meta.shards]
    count = len(sizes)
    shape, dtype = (alike.shape, alike.dtype) if alike else ((), "")
    raw_bytes = alike.nbytes + tail if alike else -1

    def check(row: IndexRow) -> None:
        _, offset, length, shard, own_shape, own_dtype, encoding, _, _ = row  # faster than names
        if shard >= count or offset + length > sizes[shard]:
            raise ValueError("its row is damaged")
        if encoding == RAW and length == raw_bytes and own_shape == shape and own_dtype == dtype:
            return
        if alike is not None and (own_shape != shape or own_dtype != dtype):
            told = f"its row says {own_dtype} of {own_shape}"
            raise ValueError(f"{told}, but {META_FILE} says {dtype} of {shape}")
        _check_sizes(row, tail)

    return check


def _check_sizes(row: IndexRow, tail: int) -> None:
    """Compare the array size of a row with the length of its sample and with the limits.

    Args:
        row: Row of the index.
        tail: Size of the label in bytes.
    """
    shape, size = row.shape, nbytes(row.dtype, row.shape)
    if size > MAX_SAMPLE_BYTES:
        raise ValueError(f"its row says {row.dtype} of {shape}, larger than 4 GiB")
    if row.encoding == RAW and row.length != size + tail:
        raise ValueError(f"its row is damaged: it has {row.length:,} bytes of {size + tail:,}")
    if row.length < tail:
        raise ValueError(f"its row is damaged: its label alone has {tail:,} bytes")
    image = row.encoding in (JPEG, IMAGE)
    if image and (len(shape) != 3 or shape[2] not in (1, 3) or not shape[0] * shape[1]):
        raise ValueError(f"its row says an image of {shape}")
