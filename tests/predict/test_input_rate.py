"""The limiting factor of the input rate, from terms made by hand."""

from dataclasses import replace

import pytest

from paceline.predict.input_rate import (
    Terms,
    nodes_until_storage_limit,
    overlapped_rate,
    rate,
    remedies,
    striping,
)

# 100 kB and 1 ms of CPU time per sample; storage with 1 GB/s, 5,000 reads/s and 2 ms per read.
TERMS = Terms(
    samples=10_000, bytes=1e5, cores=4, read_s=1e-4, decode_s=8e-4, transform_s=1e-4, alone=4000.0,
    bandwidth=1e9, operations=5000.0, wait_s=2e-3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "ranks", "limit", "samples_s"),
    [
        ({}, 4, "threads", 4 * 2 / 3e-3),
        ({"wait_s": 0.0}, 4, "processor", 4000),
        ({"wait_s": 0.0, "operations": 1000.0}, 4, "operations", 1000),
        ({"operations": 1000.0, "blocks": True}, 4, "processor", 4000),
        ({"bandwidth": 5e7}, 4, "bandwidth", 500),
        ({"alone": 300.0}, 2, "interpreter", 600),
        ({"alone": 300.0, "kind": "store"}, 2, "interpreter", 2 / (1 / 300 + 2e-3)),
        ({"kind": "store", "chunk": 9, "wait_s": 0.0}, 4, "processor", 4 / (1e-3 + 3 * 8e-4)),
        ({"wait_s": 0.0, "stored_s": 1e-3}, 4, "processor", 2000),
    ],
)
def test_input_rate_is_limited_by_smallest_term(changed, ranks, limit, samples_s):
    found = rate(replace(TERMS, **changed), ranks, 2, stored=True)
    assert (found.limit, min(found.terms.values())) == (limit, pytest.approx(samples_s))
    assert 0.95 * samples_s < found.samples_s <= 1.000001 * samples_s


def test_overlapped_rate_is_lower_if_both_rates_are_equal():
    assert overlapped_rate(1000.0, 1000.0, 1) == pytest.approx(500)  # one after the other
    assert overlapped_rate(1000.0, 1000.0, 4) == pytest.approx(800)
    assert overlapped_rate(1000.0, 1e9, 1) == pytest.approx(1000)
    assert overlapped_rate(500.0, 1000.0, 3) == pytest.approx(500 * (1 + 0.5 + 0.25) / 1.875)
    both = rate(replace(TERMS, wait_s=0.0, operations=4000.0), 4, 2, stored=True)
    assert both.samples_s == pytest.approx(8 / 9 * 4000)
    blocks = replace(TERMS, wait_s=0.0, operations=4000.0, blocks=True)
    assert rate(blocks, 4, 2, stored=True).samples_s == pytest.approx(4000)  # reads ahead


def test_page_cache_reads_are_not_limited_by_storage():
    slow = replace(TERMS, bandwidth=1e6, operations=10.0, wait_s=1.0, stored_s=1.0)
    assert rate(slow, 4, 2, stored=False).samples_s == pytest.approx(4000)
    assert rate(slow, 1, 2, stored=False).limit == "threads"


def named(terms, ranks=4, threads=2, stored=True):
    return {one.id: round(one.samples_s) for one in remedies(terms, ranks, threads, stored)}


def test_remedies_match_limit_and_predict_rate():
    found = named(TERMS)
    assert found["threads"] == 3942
    assert named(replace(TERMS, kind="files", operations=100.0)) == {"pack": 4000}
    assert named(replace(TERMS, operations=100.0)) == {"blocks": 4000, "stage": 4000}
    assert named(replace(TERMS, bandwidth=1e7)) == {"stage": 4000}
    processor = replace(TERMS, wait_s=0.0)
    assert named(processor) == {"smaller": 4865}
    assert named(replace(processor, transform_s=9e-3)) == {"offline": 4150}
    assert named(replace(processor, decode_s=1e-5, read_s=1e-3)) == {}
    store = replace(TERMS, kind="store", chunk=8, decoded=4e5, wait_s=0.0)
    assert named(store) == {"pack": 2500}
    assert named(store, ranks=1) == {"pack": 2500}  # up from 2,222: it reads, then computes
    hindered = replace(processor, alone=500.0)
    assert named(hindered, ranks=2) == {"smaller": 1653}


def test_number_of_nodes_until_storage_limits():
    assert nodes_until_storage_limit(replace(TERMS, wait_s=0.0), 4, 2) == 2
    assert nodes_until_storage_limit(replace(TERMS, operations=1000.0), 4, 2) is None
    assert (
        nodes_until_storage_limit(
            replace(TERMS, wait_s=0.0, operations=39_000.0, bandwidth=1e10), 4, 2
        )
        == 10
    )


def test_striping_advice_only_for_parallel_file_systems():
    assert "setstripe -c 4" in striping("lustre", 64 << 20)
    assert "mmlsfs" in striping("gpfs", 0)
    assert striping("ext4", 0) is None
