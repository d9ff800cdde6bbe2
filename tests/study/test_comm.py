"""``paceline bench comm``: collectives by size and backend, also written into a machine file."""

import json
import subprocess

import pytest
import ranks

from paceline.cost.machine.machine_file import HostFacts, Machine, load, save


def bench(folder, *words):
    return subprocess.run(
        [ranks.PACELINE, "bench", "comm", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=ranks.environment(COLUMNS="120"),
    )


@pytest.mark.long
def test_backends_are_measured_by_size_and_saved_in_machine_file(tmp_path):
    file = tmp_path / "machine.toml"
    save(Machine("2026-01-31T12:00:00Z", (HostFacts("here"),)), file)
    done = bench(tmp_path, "--to", "4K", "--json", "--machine", file)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    each = {one["backend"]: one for one in found["collectives"]}
    assert {"gloo", "paceline"} <= set(each)
    for one in each.values():
        assert [at["bytes"] for at in one["sizes"]] == [1 << 10, 1 << 12]
        for at in one["sizes"]:
            assert at["algbw"]["median"] == pytest.approx(at["bytes"] / at["seconds"]["median"])
            assert at["busbw"] == at["algbw"]  # the factor for two ranks is 1
    assert [at["bytes"] for at in found["copies"]] == [1 << 10, 1 << 12]
    # A later run replaces the results of an earlier one.
    again = bench(tmp_path, "--to", "1K", "--machine", file)
    assert "paceline" in again.stdout
    assert "MPI" in again.stdout
    kept = load(file).collectives
    assert sorted(one.backend for one in kept) == sorted(each)
    assert {len(one.sizes) for one in kept} == {1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--operation", "gossip"], "--operation gossip is not a collective. HINT: all-reduce,"),
        (["--to", "much"], "--to must be a size; this is 'much'. HINT: 64K, 16M or 1G"),
        (["--to", "12"], "--to must be 1K or more, the smallest vector; this is 12. HINT: --to 1K"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path, words, said):
    done = bench(tmp_path, *words)
    assert done.returncode == 2
    assert f"paceline: {said}" in done.stderr
