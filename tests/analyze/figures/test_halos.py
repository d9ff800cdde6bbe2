"""Halos by layer, from the headers of records."""

from types import SimpleNamespace

from paceline.analyze.figures.report import HaloLayer, halo_layers
from paceline.record.ring.header_schema import parse_header


def record(seconds, *layers):
    return SimpleNamespace(meta={"halos": {"seconds": seconds, "layers": layers}})


def test_exposed_shares_are_of_all_ranks_time():
    first = record(10.0, ("a (Conv3d)", 4, 100, 0.5), ("b (Conv3d)", 4, 40, 1.0))
    second = record(10.0, ("a (Conv3d)", 4, 100, 2.5))
    assert halo_layers([first, second, SimpleNamespace(meta={})]) == [
        HaloLayer("a (Conv3d)", 4, 200, 0.15),
        HaloLayer("b (Conv3d)", 4, 40, 0.05),
    ]


def test_headers_with_halos_are_read():
    text = (
        b'{"rank": 0, "size": 1, "host": "a", "started_ns": 1, "halos": {"seconds": 2.5,'
        b' "layers": [["a", 1, 2, 0.5]]}}'
    )
    assert parse_header(text, "rank-0")["halos"]["layers"] == [("a", 1, 2, 0.5)]
