"""Sizes of a study that run at the same time, on hosts of their own."""

import pytest
import ranks
from test_scale_jobs import TRAIN

from paceline.analyze.scaling.study_folder import read_study
from paceline.study.study_nodes import StudyNodes, check_side_by_side


@pytest.mark.long
def test_sizes_run_at_the_same_time_on_different_hosts(hosts, shared_folder):
    script, folder = ranks.write(shared_folder, TRAIN, "train.py"), shared_folder / "study"
    words = ("-n", "1,2", "--strong", "--side-by-side", "-H", "host1:1,host2:1,host3:1")
    words += ("--global-batch", "24", "--minutes", "4", "--precision", "100%", "--steps", "10")
    command = (ranks.PACELINE, "scale", *words, "--output", folder, script)
    done = hosts.run("host0", *command, cwd=shared_folder, timeout=400)
    assert "at the same time on different hosts" in done.stdout
    runs = read_study(folder).runs
    assert all(run.figures is not None for run in runs), [run.failure for run in runs]
    pairs = [[run for run in runs if run.started == at] for at in {run.started for run in runs}]
    assert len(pairs) == 3
    for pair in pairs:
        places = {run.setup.ranks: {one.host for one in run.figures.placement} for run in pair}
        assert {ranks: len(used) for ranks, used in places.items()} == {1: 1, 2: 2}
        assert not places[1] & places[2]
    assert not list(folder.glob("runs/*/scratch"))


def test_sizes_that_would_share_a_node_are_not_measured_side_by_side():
    with pytest.raises(ValueError, match=r"share one node \(this machine\).*HINT: leave it out"):
        check_side_by_side(StudyNodes("this machine", (2,)))
    with pytest.raises(ValueError, match=r"can't be chosen \(LSF\)"):
        check_side_by_side(StudyNodes("LSF", (2, 2)))
