"""Sources to pack: TFRecord, tars of a webdataset, .npy, netCDF 3, a table of labels.

Input: the number of the source, then the file.
"""

import io
import os
import tarfile
from collections.abc import Iterator

import numpy as np

from fuzz.scratch import new_folder
from paceline.data.format import decode, meta_schema
from paceline.data.format import npy as npy_files
from paceline.data.packing.encode import EncodingOptions, encode_sample
from paceline.data.sources.folder_source import FolderSource
from paceline.data.sources.formats import netcdf, tfrecord, webdataset
from paceline.data.sources.source import ArraySource

decode.MAX_IMAGE_PIXELS = 1 << 16
meta_schema.MAX_SAMPLE_BYTES = 1 << 20
SAMPLES = 8
FOLDER = new_folder()
(FOLDER / "in").mkdir()
(FOLDER / "in" / "a.npy").write_bytes(b"")


def seeds() -> Iterator[bytes]:
    yield b"\0" + _record(_example())
    yield b"\1" + _tar()
    made = io.BytesIO()
    np.save(made, np.arange(6.0).reshape(3, 2))
    yield b"\2" + made.getvalue()
    yield (
        b"\3" + b"CDF\x01" + bytes(4) + b"\0\0\0\x0a" + b"\0\0\0\1" + b"\0\0\0\1x\0\0\0" + bytes(60)
    )
    yield b"\4" + b"file,label\na.npy,1\nb.npy,word\n"
    yield b"\5" + _example()


def run(data: bytes) -> None:
    if not data:
        return
    kind, content = data[0] % 6, data[1:]
    if kind == 0:
        content = _mended(content)
    elif kind == 5:
        kind, content = 0, _record(content)
    elif kind == 1:
        content = _summed(content)
    path = FOLDER / ("x.tfrecord", "x.tar", "x.npy", "x.nc", "x.csv")[kind]
    path.write_bytes(content)
    if kind == 3:
        netcdf.length_note(path)
        return
    made = None
    try:
        made = _opened(kind, path)
        for i in range(min(len(made), SAMPLES)):
            try:
                loaded = made.load(i)
                encode_sample(loaded, EncodingOptions(), made.label)
                made.name(i)
            # as Encoder.one handles them
            except (OSError, ValueError, ArithmeticError, MemoryError, EOFError):
                pass
    finally:
        if made is not None:
            made.close()


def _opened(kind, path):
    if kind == 0:
        return tfrecord.TFRecordSource(path, "", None)
    if kind == 1:
        return webdataset.WebDatasetSource(path, None)
    if kind == 2:
        return ArraySource(path)
    for left in ("listing", "listing.ends"):
        (FOLDER / left).unlink(missing_ok=True)
    return FolderSource(FOLDER / "in", path, FOLDER)


def _record(content: bytes) -> bytes:
    head = len(content).to_bytes(8, "little")
    tail = tfrecord.FOOTER.pack(tfrecord._masked_crc(content))
    return head + tfrecord.FOOTER.pack(tfrecord._masked_crc(head)) + content + tail


def _mended(content: bytes) -> bytes:
    """Return the TFRecord with valid checksums of the record lengths."""
    made, at = bytearray(content), 0
    while at + 12 <= len(made):
        made[at + 8 : at + 12] = tfrecord.FOOTER.pack(
            tfrecord._masked_crc(bytes(made[at : at + 8]))
        )
        at += int.from_bytes(made[at : at + 8], "little") + 16
    return bytes(made)


def _summed(content: bytes) -> bytes:
    """Return the tar with valid checksums of the headers."""
    made = bytearray(content)
    for at in range(0, len(made) - 511, 512):
        if made[at + 257 : at + 262] == b"ustar":
            made[at + 148 : at + 156] = b" " * 8
            made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
    return bytes(made)


def _example() -> bytes:
    made = tfrecord._example()()
    features = made.features.feature
    tfrecord._put_array(features, "x", np.arange(4.0))
    features["label"].int64_list.value.append(3)
    features["name"].bytes_list.value.append(b"a")
    return made.SerializeToString()


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for k in range(2):
            for end, content in (("npy", _npy()), ("cls", b"3")):
                one = tarfile.TarInfo(f"{k:03}.{end}")
                one.size = len(content)
                if k:
                    one.pax_headers = {"comment": "a"}
                tar.addfile(one, io.BytesIO(content))
    return made.getvalue()


def _npy() -> bytes:
    made = io.BytesIO()
    np.save(made, np.arange(4.0))
    return made.getvalue()


assert npy_files.parse_npy(_npy()).shape == (4,)
assert os.path.isdir(FOLDER)
