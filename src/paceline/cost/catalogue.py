"""Hardware specifications by the vendors: catalogue.toml, each row with its source."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

_MARKS = re.compile(r"\((r|tm|c)\)|[®™©]")
_CLOCK = re.compile(r"(\bcpu\s*)?@.*$")
_NOISE = re.compile(r"\b(nvidia|tesla|amd|instinct|intel|geforce|processor|\d+-core)\b")
_GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """A GPU, one CPU socket or one network port.

    None, or a missing precision, means not known for certain. Rates are in FLOP/s and bytes/s,
    those of links for one direction.
    """

    name: str
    kind: str  # "gpu", "cpu", "network"
    names: tuple[str, ...]
    source: str
    peak: Mapping[str, float] = field(hash=False)  # FLOP/s of dense matrix products, by precision
    vector: Mapping[str, float] = field(hash=False)  # FLOP/s without matrix units, by precision
    cores: int | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None  # bytes/s of the memory, or of a network port
    link: float | None = None  # bytes/s to all GPUs of its kind together
    host_link: float | None = None  # bytes/s to its processor


def lookup(name: str) -> Row | None:
    """Return the row of a name as a driver, lscpu or sysfs reports it.

    Return None if the name is not in the catalogue, or is ambiguous.
    """
    return _by_name().get(plain(name))


@cache
def rows() -> tuple[Row, ...]:
    """Return all rows of the catalogue."""
    text = Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    return tuple(_row(entry) for entry in tomllib.loads(text)["row"])


def plain(name: str) -> str:
    """Return the distinguishing part of a name.

    "NVIDIA A100-SXM4-80GB" and "A100-SXM4-80GB" give the same result.
    """
    name = _NOISE.sub(" ", _CLOCK.sub("", _MARKS.sub("", name.lower())))
    return " ".join(re.findall(r"[a-z0-9.+]+", name))


@cache
def _by_name() -> dict[str, Row]:
    return {plain(name): row for row in rows() for name in (row.name, *row.names)}


def _row(entry: dict[str, Any]) -> Row:
    clock = entry.get("GHz", 0.0) * 1e9 * entry.get("cores", 0)
    peak = {p: clock * count for p, count in entry.get("flop_per_cycle", {}).items()}
    peak |= entry.get("peak", {})
    memory = entry.get("memory_GiB")
    return Row(
        name=entry["name"],
        kind=entry["kind"],
        source=entry["source"],
        names=tuple(entry["names"]),
        peak=MappingProxyType(peak),
        vector=MappingProxyType(peak | entry.get("vector", {})),
        memory_bytes=None if memory is None else memory * _GIB,
        cores=entry.get("cores"),
        bandwidth=entry.get("bandwidth"),
        link=entry.get("link"),
        host_link=entry.get("host_link"),
    )
