"""Knobs of Horovod scripts are set before ``hvd.init()``, and proposed only for such scripts."""

import json

import pytest
import ranks

from paceline.knobs.settings import Setting, write_settings
from paceline.predict.gains import GAINS


class Evidence:
    def __init__(self, **facts):
        self.first_facts = facts


class Cause:
    def __init__(self, name):
        self.id = name


@pytest.mark.parametrize("name", ["fusion-mb", "cycle-ms"])
def test_knobs_are_proposed_for_horovod_scripts_only(name):
    gain = GAINS[name]
    assert gain(Evidence(), Cause("exchange-latency")) is None
    values = {
        cause: gain(Evidence(horovod="paceline"), Cause(cause)).value
        for cause in ("exchange-latency", "no-overlap")
    }
    assert values["exchange-latency"] > values["no-overlap"]


def test_settings_reach_horovod_and_are_recorded(tmp_path):
    """One job: the environment variable of the user is replaced, and the record says so."""
    write_settings(tmp_path / "s.toml", {"fusion-mb": Setting(2.0), "cycle-ms": Setting(0.5)}, {})
    script = """
        import torch, horovod.torch as hvd
        from paceline.compat.horovod.core.world import current_world
        hvd.init()
        hvd.allreduce(torch.ones(2), name="x")
        found = current_world().settings
        print("found", found.fusion_bytes, found.cycle_s)
    """
    launcher = f"paceline --settings {tmp_path / 's.toml'} --record {tmp_path / 'record'}"
    done = ranks.run(ranks.write(tmp_path, script), launcher=launcher, HOROVOD_CYCLE_TIME="9")
    assert f"found {2 << 20} 0.0005" in done.stdout
    from paceline.analyze.records.load_run import load_run

    for record in load_run(tmp_path / "record").records:
        assert record.meta["horovod"] == "paceline"
        assert json.dumps(record.meta["knobs"]).count('"set": true') == 2


def test_other_scripts_say_that_the_knob_has_no_effect(tmp_path):
    write_settings(tmp_path / "s.toml", {"fusion-mb": Setting(2.0)}, {})
    launcher = f"paceline --settings {tmp_path / 's.toml'}"
    done = ranks.run(ranks.write(tmp_path, "print(1)\n"), ranks=1, launcher=launcher)
    assert "fusion-mb has no effect: the script does not use Horovod" in done.stderr
