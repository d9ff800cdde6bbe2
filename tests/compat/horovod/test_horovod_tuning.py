"""Fusion threshold and cycle time are tuned while a script trains, equally on all ranks."""

import csv
import json
import tomllib

import pytest
import ranks

from paceline.comm.tune.choice import FusionSettings
from paceline.comm.tune.tuner import MIN_STEPS
from paceline.compat.horovod.core.negotiation import Fusion, Negotiator
from paceline.compat.horovod.tuning import candidates

TRAIN = """
    import json, sys
    import torch
    import horovod.torch as hvd
    from paceline.compat.horovod.core import world
    from paceline.compat.horovod.core.execute import Executor

    hvd.init()
    used, original = [], Executor.__call__

    def execute(self, ready):
        names = [one.name for one, _ in ready]
        if self is world.current_world().sets[0].coordinator._execute:
            used.append((self.fusion_bytes, *names))
        original(self, ready)

    Executor.__call__ = execute
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(3)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        torch.manual_seed(hvd.size() * step + hvd.rank())
        net(torch.randn(4, 20)).square().mean().backward()
        optimizer.step()
    result = {"used": used, "sum": float(sum(p.double().sum() for p in net.parameters()))}
    with open(f"{hvd.rank()}.json", "w") as file:
        json.dump(result, file)
    """


def run(folder, steps, options="", **variables):
    launcher = f"paceline {options}" if options else "paceline"
    done = ranks.run(ranks.write(folder, TRAIN), str(steps), launcher=launcher, **variables)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)], done.stderr


def test_all_ranks_use_the_same_settings_and_the_result_is_stored(tmp_path):
    plain, _ = run(tmp_path, MIN_STEPS)
    assert {one[0] for one in plain[0]["used"]} == {128 << 20}
    file = tmp_path / "tuned.toml"
    tuned, stderr = run(tmp_path, MIN_STEPS + 5, f"--tune-exchange {file}")
    # Which operations meet is a matter of time, but the settings are those of both ranks.
    assert tuned[0]["used"] == tuned[1]["used"]
    sizes = {one[0] for one in tuned[0]["used"]}
    assert sizes == {128 << 20, 32 << 20, 2 << 20}
    assert f"; stored in {file}" in stderr
    tree = tomllib.loads(file.read_text())
    assert tree["made"]["horovod"] is True
    again, stderr = run(tmp_path, MIN_STEPS, f"--tune-exchange {file}")
    assert f"the exchange uses the settings of {file}: a fusion threshold of " in stderr
    assert len({one[0] for one in again[0]["used"][1:]}) <= 2
    assert again[0]["sum"] == plain[0]["sum"] == again[1]["sum"]


def test_autotune_of_horovod_with_its_log(tmp_path):
    variables = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "log.csv"}
    found, stderr = run(tmp_path, MIN_STEPS, HOROVOD_FUSION_THRESHOLD="1048576", **variables)
    assert {one[0] for one in found[0]["used"]} == {1 << 20}  # a variable that is set is obeyed
    assert "tuning the exchange of Horovod's operations (HOROVOD_AUTOTUNE)" in stderr
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert {float(row["cycle_time_ms"]) for row in rows} == {1, 0.25, 5, 20}
    assert all(float(row["tensor_fusion_threshold_mib"]) == 1 for row in rows)
    _, stderr = run(tmp_path, 9, HOROVOD_CYCLE_TIME="1", HOROVOD_FUSION_THRESHOLD="9", **variables)
    assert "HINT: unset one of them" in stderr


def test_script_that_ends_before(tmp_path):
    _, stderr = run(tmp_path, 9, f"--tune-exchange {tmp_path / 'tuned.toml'}")
    assert "the script ended in step 8, before the tuning was complete" in stderr
    assert "no DistributedDataParallel" not in stderr


def test_settings_change_on_all_ranks_in_one_meeting():
    first, second = (Negotiator(rank, [3, 5], 9) for rank in (0, 1))
    fusion = Fusion(7, 0.1)
    first.wants_fusion, second.wants_fusion = fusion, Fusion(8, 0.2)
    vectors = first.vector(), second.vector()
    assert vectors[0][0] == vectors[1][0] == 0
    messages = [first.message(), second.message()]
    assert [one.decide(b"\0", messages).fusion for one in (first, second)] == [fusion] * 2
    assert first.vector()[0] == 1  # no news any more


@pytest.mark.parametrize("mib", [128.0, 2.0])
def test_candidates_are_other_settings(mib):
    default = FusionSettings(mib, 1.0)
    found = candidates(default, {})
    assert default not in found
    assert len(set(found)) == len(found) <= 6
    assert {one.mib for one in candidates(default, {"HOROVOD_FUSION_THRESHOLD": ""})} == {mib}
    assert FusionSettings.from_knobs(found[0].to_knobs()) == found[0]
