"""paceline diagnose on real ranks: planted faults are named, and no user file changes."""

import json
import os
import subprocess
import textwrap

import pytest
import ranks

from paceline.security.overlay import Overlay
from paceline.study.diagnose import ladder
from paceline.study.diagnose.diagnose import run_diagnosis
from paceline.study.diagnose.run_script import RunRequest

pytestmark = pytest.mark.alone
TRAIN = """
    import os, sys, time, torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    from torch.utils.data.distributed import DistributedSampler

    class Slow(Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, i):
            time.sleep(float(sys.argv[1]))
            return {"x": torch.ones(64), "y": torch.tensor(0.5)}

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Slow()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    os.makedirs("made/inside", exist_ok=True)
    log = open("made/log.txt", "w")
    for epoch in range(30):
        for batch in loader:
            x = batch.pop("x")
            x.mul_(2)  # in place
            if not bool((x == 2).all()):
                sys.exit("the batch from memory is not as it came from the loader")
            loss = (model(x) - batch["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.write(f"{loss}\\n")
            time.sleep(0.004)
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "model.tmp")
            os.replace("model.tmp", "model.pt")
            open("made/log.txt").read()
            there = sorted(os.listdir("made"))
            if there != ["inside", "log.txt"] or not os.path.exists("model.pt"):
                sys.exit("what was written is not there")
        if len(sys.argv) > 2 and epoch == 1:
            open("data.txt", "w").close()
    """


@pytest.fixture
def script(tmp_path):
    (tmp_path / "data.txt").write_text("precious")
    return ranks.write(tmp_path, TRAIN)


@pytest.mark.long
def test_slow_loader_is_reported_without_changing_files(script, monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "REPETITIONS", (2, 2))
    monkeypatch.chdir(tmp_path)
    said = []
    asked = RunRequest(str(script), ["0.015"], [], ["--threads", "1"], 2, steps=16, warm=4)
    found = run_diagnosis(asked, said.append)
    assert len(said) == 2 + 2 * 2  # the first run, the profile of operators, and two rounds
    # Other tests run beside this one, so rounds may differ.
    assert [note for note in found.notes if "step times of different rounds" not in note] == []
    assert found.report.size == 2
    rungs = found.ladder.rungs
    assert [one.cached for one in rungs["cached"]] == [
        40,
        40,
    ]  # includes those of the next phase
    assert [one.silent for one in rungs["silent"]] == [1, 1]
    assert [one.ranks for one in rungs["alone"]] == [1, 1]
    # Four samples of 15 ms each; without them a step is several times shorter.
    assert all(one.step_s > 0.06 for one in rungs["everything"])
    assert all(one.step_s < 0.03 for one in rungs["cached"])
    assert found.operators.ranks == 2
    forward = next(one for one in found.operators.operators if one.row.operator == "addmm")
    assert forward.code == 'loss = (model(x) - batch["y"]).square().mean()'
    assert forward.row.module == "DistributedDataParallel.module"
    of_step = found.waterfall.of_step("input")
    assert of_step.mean > 0.5
    record = next(one.record for one in found.witnesses if one.name == "input")
    assert record == pytest.approx(of_step.mean, abs=0.15)
    assert found.ladder.loader["batches"] > 10
    assert found.ladder.loader["busy_s"] < 0.5 * found.ladder.loader["seconds"]
    assert sorted(os.listdir(tmp_path)) == ["data.txt", "script.py"]


@pytest.mark.long
def test_script_that_overwrites_its_files_changes_none(script, tmp_path):
    done = run(script, "--minutes", "0.5", "--steps", "16", script, "0", "overwrites")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data.txt").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["data.txt", "script.py"]


def test_script_that_cannot_be_protected_is_stopped(tmp_path, monkeypatch):
    """Without overlays, for example on several nodes."""
    monkeypatch.setattr(Overlay, "prepare", lambda *_: None)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "data.txt").write_text("precious")
    script = ranks.write(tmp_path, f"import os, torch\nos.rename('{tmp_path}/old', 'new')")
    with pytest.raises(ValueError, match="stopped the script") as error:
        run_diagnosis(RunRequest(str(script), [], [], [], 1), lambda said: None)
    assert f"{tmp_path}/old would have been changed or removed. HINT: let" in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["old", "script.py"]


def test_failing_script_is_reported(tmp_path):
    script = ranks.write(tmp_path, "raise RuntimeError('no data here')")
    done = run(script, script)
    assert done.returncode == 2
    assert "the script with all ranks ended with exit code 1:" in done.stderr
    assert "RuntimeError: no data here" in done.stderr
    assert "Traceback (most recent" not in done.stderr.partition("paceline: the script with all")[0]


def run(script, *words):
    command = [ranks.PACELINE, "diagnose", "-n", "2", "--threads", "1", "--json", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=script.parent, env=ranks.environment()
    )


@pytest.mark.long
def test_json_output_matches_documentation(script):
    done = run(script, "--minutes", "1", "--steps", "16", script, "0.005")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["format"], found["version"], found["ranks"]) == ("paceline-diagnosis", 1, 2)
    assert found["causes"][0]["id"] == "input-waiting"
    assert found["causes"][0]["share"] > 0.4
    whole = found["waterfall"]
    lost = sum(bar["loss"]["mean"] for bar in whole["bars"])
    assert whole["ideal"]["mean"] - lost == pytest.approx(whole["measured"]["mean"])


IMAGES = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(torch.randn(112, 3, 8, 8), 4)
    for epoch in range(2):
        for x in loader:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""


@pytest.mark.long
def test_short_script_with_images_and_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "REPETITIONS", (2, 2))
    monkeypatch.chdir(tmp_path)
    asked = RunRequest(str(ranks.write(tmp_path, IMAGES)), [], [], ["--threads", "2"], 2, minutes=3)
    found = run_diagnosis(asked, lambda said: None)
    # Fewer than ladder.LEAST_STEPS, so the script ends too early on any machine.
    assert found.ladder.steps == 56 // 4 - 5
    assert found.notes[0].startswith(
        "the script ends after 56 steps: each experiment measures only 9"
    )
    rungs = found.ladder.rungs
    assert {name: len(rungs[name]) for name in ladder.RUNGS} == dict.fromkeys(ladder.RUNGS, 2)
    assert len(found.ladder.savings["alone, channels-last"]) == 2 * 2  # pairs of blocks
    assert found.ladder.facts[0]["convolutions"] == 1
    assert found.ladder.facts[0]["parameters"]["float32"] == 4 * (8 * 27 + 8 + 8 * 36 + 1)
    assert {one.name for one in found.witnesses} > {"threads", "layout"}


@pytest.mark.long
def test_single_rank_failure_uses_fastest_run_as_ideal(monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "REPETITIONS", (2, 2))
    monkeypatch.chdir(tmp_path)
    alone = "    if dist.get_world_size() == 1:\n        sys.exit('needs more memory')\n"
    text = textwrap.dedent(TRAIN).replace("model = nn", textwrap.dedent(alone) + "model = nn", 1)
    script = ranks.write(tmp_path, text)
    asked = RunRequest(str(script), ["0.005"], [], ["--threads", "1"], 2, steps=16)
    found = run_diagnosis(asked, lambda said: None)
    assert "needs more memory" in found.notes[0]
    assert found.notes[1].startswith("one rank alone could not be run")
    assert "sharing" not in [bar.id for bar in found.waterfall.bars]
    assert found.waterfall.repetitions == 2
    assert found.waterfall.of_step("input").mean > 0.3
