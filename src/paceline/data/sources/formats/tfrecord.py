"""TFRecord files of tf.train.Example, read with protobuf; TensorFlow is not needed.

Features written: ``x`` (an image's bytes as ``image/encoded``; for an array its bytes, with
``x/dtype`` and ``x/shape``), ``label`` (a class, or an array in the same way) and ``name``.
"""

import functools
import os
import struct
from array import array
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from ....security.text import printable
from ...boundary import Boundary
from ...format.meta_schema import DTYPES, MAX_DIMS, ArraySpec, nbytes
from ..bounded_read import OpenFile, read_at
from ..source import LoadedSample, Source, label_field
from . import (
    ExportInfo,
    Sample,
    check_compression,
    data_files,
    import_format_package,
    read_class_names,
    write_classes,
)

HEADER, FOOTER = struct.Struct("<QI"), struct.Struct("<I")
IMAGE, DATA, LABEL, NAME = "image/encoded", "x", "label", "name"
SAMPLES = (IMAGE, DATA, "image", "image_raw", "data", "input")
LABELS = (LABEL, "image/class/label", "y", "target")
MAX_EXAMPLE_BYTES = (1 << 31) - 16  # protobuf's limit
MAX_SHOWN_FEATURES = 20
KINDS = ("bytes_list", "float_list", "int64_list")


def source(path: Path, name: str, labels: str | None, boundary: Boundary) -> "TFRecordSource":
    return TFRecordSource(path, name, labels)


class TFRecordSource(Source):
    """A TFRecord file, or a folder of them. name, labels: features, by default those with a usual
    name. Lengths are checked when it is opened, contents when they are read."""

    def __init__(self, path: Path, name: str, labels: str | None) -> None:
        super().__init__()
        self.description = str(path)
        self.paths = data_files(path)
        self._files = [OpenFile(file) for file in self.paths]
        self._file_numbers, self._offsets = array("i"), array("q")
        for number, file in enumerate(self.paths):
            self._index_records(number, file)
        if not self._offsets:
            raise ValueError(f"{path} contains no records")
        first = self._features(0)
        self._data = self._choose_feature(first, name, SAMPLES, "PATH:FEATURE")
        self._labels = labels or next((feature for feature in LABELS if feature in first), "")
        if labels:
            self._choose_feature(first, labels, (), "--labels FEATURE")
        self.has_names = NAME in first and NAME not in (self._data, self._labels)
        sample = self._loaded(first, None)
        self.kind, self.has_arrays = sample.kind, not isinstance(sample.data, bytes)
        if self._labels:
            label = self._value(first, self._labels)
            self.label = "class" if isinstance(label, int) else _field(label, path)
        if self.label == "class":
            self.classes = read_class_names(path)

    def __len__(self) -> int:
        return len(self._offsets)

    def load(self, i: int) -> LoadedSample:
        features = self._features(i)
        if self._data not in features:
            raise ValueError(f"has no feature {self._data!r}")
        label = self._value(features, self._labels) if self._labels else None
        return self._loaded(features, label)

    def name(self, i: int) -> str:
        return self._name(self._features(i)) if self.has_names else ""

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _loaded(self, features: Any, label: Any) -> LoadedSample:
        content = self._value(features, self._data)
        data = content if isinstance(content, bytes) else np.asarray(content)
        return LoadedSample(data, label, self._name(features))

    def _name(self, features: Any) -> str:
        if not self.has_names or NAME not in features:
            return ""
        return b"".join(features[NAME].bytes_list.value).decode(errors="replace")

    def _index_records(self, number: int, path: Path) -> None:
        """Find the offset of each record in a file."""
        at, size = 0, os.fstat(self._files[number].fd).st_size
        if not size:
            self.notes.append(f"{path} is empty")
        while at < size:
            head = os.pread(self._files[number].fd, HEADER.size, at)
            if not begins_with_record(head):
                check_compression(path)
                raise ValueError(f"{path} has no TFRecord at byte {at:,}. HINT: copy it again")
            length, _ = HEADER.unpack(head)
            end = at + HEADER.size + length + FOOTER.size
            if end > size:
                raise ValueError(f"{path} is truncated: it has {size:,} bytes of at least {end:,}")
            if length > MAX_EXAMPLE_BYTES:
                raise ValueError(
                    f"{path}: the record at byte {at:,} has {length:,} bytes, over 2 GiB"
                )
            self._file_numbers.append(number)
            self._offsets.append(at)
            at = end

    def _features(self, i: int) -> Any:
        at, file = self._offsets[i], self._files[self._file_numbers[i]].fd
        length, _ = HEADER.unpack(os.pread(file, HEADER.size, at))
        data = read_at(file, length + FOOTER.size, at + HEADER.size)
        if len(data) < length + FOOTER.size:
            raise ValueError(f"is truncated at byte {at:,}")
        content, (crc,) = data[:length], FOOTER.unpack(data[length:])
        if crc != _masked_crc(content):
            raise ValueError(f"a byte has changed at {at:,} (its checksum differs)")
        example = _example()()
        try:
            example.ParseFromString(content)
        except Exception as error:  # its type depends on protobuf's implementation
            raise ValueError(f"is not a tf.train.Example: {error}") from None
        return example.features.feature

    def _choose_feature(self, first: Any, name: str, usual: tuple[str, ...], hint: str) -> str:
        if name and name in first:
            return name
        found = next((feature for feature in usual if feature in first), "")
        if name or not found:
            what = f"no feature {name!r}" if name else "no feature with a usual name"
            there = printable(", ".join(sorted(first)[:MAX_SHOWN_FEATURES]))
            raise ValueError(f"{self.description} has {what}; it has {there}. HINT: {hint}")
        return found

    def _value(self, features: Any, name: str) -> Any:
        """Return a feature as bytes, an integer or an array."""
        if name not in features:
            raise ValueError(f"has no feature {name!r}")
        kind = features[name].WhichOneof("kind")
        if kind is None:
            raise ValueError(f"feature {name!r} is empty")
        values = getattr(features[name], kind).value
        if f"{name}/dtype" in features:
            return self._array(features, name, values)
        if kind == "bytes_list":
            if len(values) != 1:
                raise ValueError(f"feature {name!r} has {len(values)} values")
            return values[0]
        if kind == "int64_list":
            return int(values[0]) if len(values) == 1 else np.asarray(values, np.int64)
        return np.asarray(values, np.float32)

    def _array(self, features: Any, name: str, values: Any) -> Any:
        """Return the array of a feature that has a dtype and a shape beside it."""
        dtype_values = features[f"{name}/dtype"].bytes_list.value
        shape = tuple(features[f"{name}/shape"].int64_list.value)
        dtype = bytes(dtype_values[0]).decode(errors="replace") if len(dtype_values) == 1 else ""
        if dtype not in DTYPES or len(shape) > MAX_DIMS or any(side < 0 for side in shape):
            raise ValueError(f"feature {name!r} is {printable(dtype)[:20]} of {shape[:MAX_DIMS]}")
        if len(values) != 1 or not isinstance(values[0], bytes):
            raise ValueError(f"feature {name!r} has no bytes of an array")
        size = nbytes(dtype, shape)
        if size != len(values[0]):
            raise ValueError(f"feature {name!r} has {len(values[0]):,} bytes of {size:,}")
        return np.frombuffer(values[0], dtype).reshape(shape)


def begins_with_record(head: bytes) -> bool:
    """Return whether bytes begin with a record's length and its checksum."""
    head = head[: HEADER.size]
    return len(head) == HEADER.size and HEADER.unpack(head)[1] == _masked_crc(head[:8])


def _field(label: Any, path: Path) -> ArraySpec:
    if isinstance(label, bytes):
        raise ValueError(
            f"{path}: labels are bytes. HINT: name a feature of numbers: --labels FEATURE"
        )
    return label_field(label.dtype.name, label.shape, str(path))


def _masked_crc(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _example() -> Any:
    """Return the class of tf.train.Example, equivalent to example.proto and feature.proto of
    TensorFlow."""
    parts = ("descriptor_pb2", "descriptor_pool", "message_factory")
    descriptor_pb2, descriptor_pool, message_factory = (
        import_format_package(f"google.protobuf.{part}", "protobuf") for part in parts
    )
    file = descriptor_pb2.FileDescriptorProto(
        name="paceline/example.proto", package="paceline.tf", syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto
    repeated, single, message = field.LABEL_REPEATED, field.LABEL_OPTIONAL, field.TYPE_MESSAGE
    kinds = (field.TYPE_BYTES, field.TYPE_FLOAT, field.TYPE_INT64)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(zip(KINDS, kinds, strict=True), 1):
        values = file.message_type.add(name=f"L{number}")
        values.field.add(name="value", number=1, type=kind, label=repeated)
        of = f".paceline.tf.L{number}"
        feature.field.add(
            name=name, number=number, type=message, type_name=of, label=single, oneof_index=0
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=single)
    of = ".paceline.tf.Feature"
    entry.field.add(name="value", number=2, type=message, type_name=of, label=single)
    of = ".paceline.tf.Features.FeatureEntry"
    features.field.add(name="feature", number=1, type=message, type_name=of, label=repeated)
    example = file.message_type.add(name="Example")
    of = ".paceline.tf.Features"
    example.field.add(name="features", number=1, type=message, type_name=of, label=single)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("paceline.tf.Example"))


def write(path: Path, info: ExportInfo, samples: Iterator[Sample]) -> None:
    """Write a folder of files of about ``shard_bytes``."""
    path.mkdir(exist_ok=True)
    for files in count():
        first = next(samples, None)
        if first is None:
            break
        with (path / f"{files:06}.tfrecord").open("wb") as file:
            for sample in chain([first], samples):
                content = _serialize(info, sample)
                for part in (len(content).to_bytes(8, "little"), content):
                    file.write(part + FOOTER.pack(_masked_crc(part)))
                if file.tell() >= info.shard_bytes:
                    break
    write_classes(path, info)


def _serialize(info: ExportInfo, sample: Sample) -> bytes:
    example = _example()()
    features = example.features.feature
    if isinstance(sample.data, bytes):
        images = info.meta.packed.get("kind") == "images"
        features[IMAGE if images else DATA].bytes_list.value.append(sample.data)
    else:
        _put_array(features, DATA, sample.data)
    if isinstance(sample.label, np.ndarray):
        _put_array(features, LABEL, sample.label)
    elif sample.label is not None:
        features[LABEL].int64_list.value.append(sample.label)
    if info.meta.names:
        features[NAME].bytes_list.value.append(os.fsencode(sample.name))
    serialized: bytes = example.SerializeToString(deterministic=True)
    return serialized


def _put_array(features: Any, name: str, array: np.ndarray[Any, Any]) -> None:
    features[name].bytes_list.value.append(array.tobytes())
    features[f"{name}/dtype"].bytes_list.value.append(array.dtype.name.encode())
    features[f"{name}/shape"].int64_list.value.extend(array.shape)
