"""Check that a row of the index describes an array that the set may hold, before memory is taken.

A row's checksum finds damage. It does not prove who wrote the row.
"""

from .meta_schema import MAX_SAMPLE_BYTES, nbytes
from .shard_format import IMAGE, JPEG, META, RAW, Meta, Row


class RowCheck:
    """The check of one set, called with each row.

    Raises:
        ValueError: The row contradicts paceline.json, or the length of its own sample.
    """

    def __init__(self, meta: Meta) -> None:
        self.alike, self.tail, self.shards = meta.array, meta.tail, meta.shards
        # Bytes of each sample where all are alike, so that no row has to be multiplied out.
        self.nbytes = meta.array.nbytes if meta.array else -1

    def __call__(self, row: Row) -> None:
        shards, alike, size = self.shards, self.alike, self.nbytes
        if row.shard >= len(shards) or row.offset + row.length > shards[row.shard].bytes:
            raise ValueError("its row is damaged")
        if alike is None:
            size = nbytes(row.dtype, row.shape)
            if size > MAX_SAMPLE_BYTES:
                raise ValueError(f"its row says {row.dtype} of {row.shape}, larger than 4 GiB")
        elif row.shape != alike.shape or row.dtype != alike.dtype:
            raise ValueError(
                f"its row says {row.dtype} of {row.shape}, and {META} {alike.dtype} of "
                f"{alike.shape}"
            )
        if row.encoding == RAW:
            if row.length != size + self.tail:
                raise ValueError(
                    f"its row is damaged: it has {row.length:,} bytes of {size + self.tail:,}"
                )
        elif row.length < self.tail:
            raise ValueError(f"its row is damaged: its label alone has {self.tail:,} bytes")
        elif row.encoding in (JPEG, IMAGE):
            shape = row.shape
            if len(shape) != 3 or shape[2] not in (1, 3) or not shape[0] * shape[1]:
                raise ValueError(f"its row says an image of {shape}")
