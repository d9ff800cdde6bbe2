"""The hardware catalogue: entries are found by the names that drivers report and are plausible."""

import pytest

from paceline.cost.catalogue import lookup, plain, rows
from paceline.cost.roofline import ridge

ORDER = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("Tesla P100-PCIE-16GB", "P100 PCIe 16GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA GH200 120GB", "GH200 96GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI250X", "MI250X (one GCD of two)"),
        ("Intel(R) Data Center GPU Max 1550", "Max 1550"),
        ("AMD EPYC 7763 64-Core Processor", "EPYC 7763"),
        ("Intel(R) Xeon(R) Platinum 8280 CPU @ 2.70GHz", "Xeon Platinum 8280"),
        ("Intel(R) Xeon(R) Platinum 8480+", "Xeon Platinum 8480+"),
        ("100 Gb/sec (4X EDR)", "InfiniBand EDR"),
    ],
)
def test_hardware_is_found_by_driver_name(name, row):
    assert lookup(name).name == row


@pytest.mark.parametrize(
    "name", ["", "NVIDIA H100", "AMD EPYC", "Neoverse-V2", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"]
)
def test_unknown_or_ambiguous_hardware_is_none(name):
    assert lookup(name) is None


def test_catalogue_matches_data_sheets():
    a100, epyc = lookup("NVIDIA A100-SXM4-40GB"), lookup("AMD EPYC 7763 64-Core Processor")
    assert (a100.peak["float64"], a100.vector["float64"]) == (19.5e12, 9.7e12)
    assert a100.vector["float32"] == a100.peak["float32"] == 19.5e12
    assert (a100.memory_bytes, a100.bandwidth, a100.link) == (40 << 30, 1555e9, 300e9)
    assert epyc.peak["float64"] == pytest.approx(64 * 2.45e9 * 16)
    assert lookup("Slingshot-11").bandwidth == 25e9


def test_hardware_names_are_unique():
    names = [(plain(name), row.name) for row in rows() for name in (row.name, *row.names)]
    assert len({name for name, _ in names}) == len(set(names))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_catalogue_rows_have_source_and_plausible_figures(row):
    assert len(row.source) > 8
    assert row.kind in ("gpu", "cpu", "network")
    assert 1e9 <= row.bandwidth <= 1e13
    assert set(row.peak) <= set(ORDER)
    assert all(row.vector[precision] <= rate for precision, rate in row.peak.items())
    rates = [row.peak[p] for p in ORDER if p in row.peak and p != "bfloat16"]
    assert rates == sorted(rates)
    if row.kind == "network":
        return
    assert 1e11 <= row.peak["float32"] <= 1e15
    assert 2 < ridge(row.peak["float32"], row.bandwidth) < 120
    if row.kind == "gpu":
        assert 8 << 30 <= row.memory_bytes <= 512 << 30
        assert 5e-3 < row.memory_bytes / row.bandwidth < 0.1  # seconds to read all memory once
        for link in (row.link, row.host_link):
            assert link is None or link < row.bandwidth
