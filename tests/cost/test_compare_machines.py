"""Comparison of two machine files: changes are reported, noise is not."""

import math
from dataclasses import replace

import pytest
from machines import Maker, with_host, with_links

from paceline.cost.compare_machines import FALSE_CHANGE_LEVEL, compare
from paceline.cost.machine.machine_file import UNLIMITED, Figure, Limits
from paceline.cost.machine.units import size


class Repeated(Maker):
    """A machine of which a later measurement differs by as much as repetitions do."""

    def figure(self, value, unit, noise=None):
        noise = self.noise if noise is None else noise
        self.apart = noise * math.sqrt(1 - 2 / math.pi)  # deviation of a half-normal distribution
        return super().figure(value, unit, noise)


def sentences(changes):
    return [change.sentence for change in changes]


@pytest.mark.parametrize("count", [1, 2, 16])
def test_repeated_checks_of_one_machine_show_no_change(count):
    for seed in range(20):
        before, after = (Maker(s, apart=0).machine(count, gpus=2) for s in (seed, seed + 1000))
        assert sentences(compare(before, after)) == []


@pytest.mark.long
@pytest.mark.parametrize("repeats", [3, 5, 40])
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_unchanged_machine_has_a_change_in_at_most_the_stated_share_of_comparisons(noise, repeats):
    wrong = 0
    for seed in range(100):
        before, after = (
            Repeated(s, noise, repeats=repeats).machine(4, gpus=1) for s in (seed, seed + 1000)
        )
        wrong += bool(compare(before, after))
    assert wrong <= 100 * FALSE_CHANGE_LEVEL


@pytest.mark.parametrize("repeats", [5, 40])
def test_change_of_many_figures_by_a_third_is_found_beside_noise(repeats):
    makers = (Repeated(seed, 0.02, repeats=repeats) for seed in (1, 2))
    found = compare(
        *(maker.machine(4, slow, gpus=1) for maker, slow in zip(makers, [[], [2]], strict=True))
    )
    assert {change.hosts for change in found} == {("host2",)}
    assert len(found) >= 8  # of 10


def test_slower_host_is_reported_with_its_figures():
    before = Maker(1, noise=1e-4, apart=0).machine(4, gpus=1)
    after = Maker(2, noise=1e-4, apart=0).machine(4, slow=[2], gpus=1)
    found = compare(before, after)
    assert {change.hosts for change in found} == {("host2",)}
    assert len(found) == 10
    assert all(change.better is False for change in found)
    assert all(change.by == pytest.approx(-0.3, abs=0.01) for change in found)
    assert (
        "float32 matrix product of host2 cuda:0 was 2 TFLOP/s and is 1.4 TFLOP/s (-30 %): worse"
        in sentences(found)
    )


def test_sizes_have_at_most_four_digits():
    shown = [size(count) for count in (512, 1023, 2048, 1023.7 * 2**10, 2.5 * 2**40)]
    assert shown == ["512 B", "1023 B", "2 KiB", "1024 KiB", "2.5 TiB"]


def test_common_changes_are_reported_once_and_sorted_by_size():
    maker = Maker(3, apart=0)
    before, after = maker.machine(8), maker.machine(8)
    after = with_links(after, maker, lambda a, b: 2.0)
    for host in after.hosts:
        faster = tuple(
            replace(folder, read=maker.figure(2e9 * 3, "B/s", 0.01)) for folder in host.storage
        )
        after = with_host(after, host.name, storage=faster)
    found = compare(before, after)
    assert [change.what for change in found] == ["reading in /scratch/data", "bandwidth", "latency"]
    assert found[0].sentence.startswith("reading in /scratch/data of all 8 hosts was 2")
    assert found[1].sentence.startswith("bandwidth of all 28 links was 20")
    assert found[2].sentence.endswith(" (-50 %): better")
    assert all(change.better for change in found)
    assert len(found[0].hosts) == 8


def test_degraded_link_is_reported():
    maker = Maker(4, apart=0)
    before = maker.machine(4)
    after = with_links(before, maker, lambda a, b: 0.3 if (a, b) == ("host0", "host3") else 1)
    found = compare(before, after)
    assert [change.hosts for change in found] == [("host0", "host3")] * 2
    assert found[0].sentence.startswith(("bandwidth of the link of host0 - host3", "latency of"))


def test_change_of_collective_over_all_ranks_has_no_host():
    before = after = Maker(5, apart=0).machine(3)
    whole = before.collectives[-1]
    slow = replace(whole, latency=Figure(1e-3, 0.9e-3, 1.1e-3, 5, "s"))
    after = replace(after, collectives=(*before.collectives[:-1], slow))
    (found,) = compare(before, after)
    assert found.hosts == ()
    assert found.sentence.startswith("latency of all-reduce (gloo) over all ranks was 2")


def test_hosts_versions_parts_and_limits_are_reported_first():
    before = Maker(6).machine(3, links=False)
    after = replace(before, hosts=before.hosts[:2], unreachable={"host2": "no answer in 10 s"})
    after = replace(after, hosts=(*after.hosts, replace(before.hosts[0], name="host7")))
    limits = Limits(1024, UNLIMITED, 8 << 20, 256 << 30, 1, 512 << 30)
    for name in ("host0", "host1"):
        after = with_host(after, name, versions={"python": "3.11.7", "torch": "2.7.0"})
        after = with_host(after, name, limits=limits, free_memory_bytes=1)
    after = with_host(after, "host1", memory_bytes=480 << 30, arithmetic=())
    assert sentences(compare(before, after)) == [
        "host2 can't be reached any more: no answer in 10 s",
        "host7 is new",
        "torch was 2.6.0 and is 2.7.0 on host0 and host1",
        "paceline was 0.1.0 and is none on host0 and host1",
        "limit nofile was 1048576 and is 1024 on host0 and host1",
        "limit memlock was 1 TiB and is unlimited on host0 and host1",
        "memory was 512 GiB and is 480 GiB on host1",
    ]
