"""CPU use of the ranks' loaders beside training."""

import records

from paceline.report.terminal.run_report import render


def report(tmp_path, *told):
    ranks = []
    for number, one in enumerate(told):
        rank = records.Rank(tmp_path, number, len(told), **({"loader": one} if one else {}))
        for step in range(4):
            rank.step(step * 10, step * 10 + 10, samples=8, number=step)
        ranks.append(rank)
    return records.report_of(ranks)


def told(busy, left_out=0):
    fixed = {"workers": 2, "processes": False, "seconds": 10.0}
    return fixed | {"busy_s": busy, "left_out": left_out}


def test_loader_cores_are_mean_and_maximum_over_ranks(tmp_path):
    found = report(tmp_path, told(2.0, 3), told(6.0, 1))
    loading = found.loading
    assert (loading.workers, loading.processes, loading.left_out) == (2, False, 4)
    assert (loading.cores, loading.most, loading.rank) == (0.4, 0.6, 1)
    said = " ".join(render(found).replace("│", "").split())
    assert "the 2 loader threads of each rank used 0.40 cores on average" in said
    assert "at most 0.60 (rank 1)" in said
    assert "4 samples could not be read and were skipped" in said


def test_other_loaders_have_no_totals(tmp_path):
    found = report(tmp_path, None, None)
    assert found.loading is None
    assert "loader" not in render(found)
