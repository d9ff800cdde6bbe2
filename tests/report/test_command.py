"""``paceline report`` on valid and on damaged records."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import ranks
from records import Rank, made

from paceline.analyze.records.load_run import load_run
from paceline.analyze.scaling.critical.critical_model import FILE as CRITICAL_FILE
from paceline.analyze.scaling.study_folder import STUDY_FILE
from paceline.record.ring.states import State


def report(*words, check=True, **env):
    result = subprocess.run(
        [ranks.PACELINE, "report", *map(str, words)],
        capture_output=True,
        text=True,
        env=ranks.environment(NO_COLOR="1", **env),
    )
    if check:
        assert result.returncode == 0, result.stderr
    return result


def refusal(*words):
    result = report(*words, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_report_of_one_record_has_states_efficiencies_and_losses(tmp_path):
    text = report(made(tmp_path / "run", size=4)).stdout
    flat = re.sub(r"[│\s]+", " ", text)
    assert "4 ranks on 2 nodes, 41 steps" in flat
    assert re.search(r"useful +\d+\.\d %", text)
    for name in ("parallel efficiency", "load balance", "serialisation", "transfer"):
        assert re.search(rf"{name} +[01]\.\d\d", text), name
    assert "Waiting for rank 3 (node1), which computed longer; mostly in all-reduce" in flat
    assert "All-reduce itself, after the last rank had arrived" in flat
    assert "in all steps" in flat
    assert "recording cost" in flat


def test_json_is_versioned_and_matches_table(tmp_path):
    folder = made(tmp_path / "run")
    data = json.loads(report("--json", folder).stdout)
    assert (data["format"], data["version"]) == ("paceline-report", 1)
    assert [sum(rank.values()) for rank in data["states"]] == [pytest.approx(1)] * 2
    assert data["losses"][0]["kind"] in ("wait", "transfer", "other")
    assert data["ranks"] == [0, 1]
    assert data["samples"] == 2 * 8 * 40


def test_steps_option_selects_range(tmp_path):
    folder = made(tmp_path / "run")
    data = json.loads(report("--json", "--steps", "10:20", folder).stdout)
    assert data["samples"] == 2 * 8 * 10
    assert "this is '20:10'" in refusal("--steps", "20:10", folder)
    assert "were not recorded" in refusal("--steps", "900:999", folder)


def test_two_records_of_same_size_are_compared_with_noise(tmp_path):
    before = made(tmp_path / "before")
    same = made(tmp_path / "same")
    faster = made(tmp_path / "faster", compute=10)
    text = report(before, faster).stdout
    assert re.search(r"step \(ms\) +\S+ +\S+ +-\d+\.\d % +better", text)
    assert "better" not in report(before, same).stdout
    data = json.loads(report("--json", before, faster).stdout)
    assert data["format"] == "paceline-comparison"
    (step,) = [row for row in data["rows"] if row["figure"] == "step_ms"]
    assert step["real"]
    assert step["after"] < step["before"]


def test_further_records_of_each_kind_show_noise_between_runs(tmp_path):
    before = [made(tmp_path / f"b{i}", compute=20 + 0.1 * i) for i in range(3)]
    after = [made(tmp_path / f"a{i}", compute=20.5 + 0.1 * i) for i in range(2)]
    single = report(before[0], after[0]).stdout
    flat = re.sub(r"[│\s]+", " ", single)
    assert re.search(r"One run of each: differences of the step time below [67]\.\d % can", flat)
    assert re.search(r"step \(ms\) +\S+ +\S+ +\S+ % +within the noise", single)
    words = [word for folder in before for word in ("--baseline", folder)]
    text = re.sub(r"[│\s]+", " ", report(*words, *after).stdout)
    assert "3 runs before and 2 runs after: differences of the step time below" in text
    assert re.search(r"step \(ms\) \S+ \S+ \+1.\d % worse", text)
    data = json.loads(report("--json", *words, *after).stdout)
    assert data["runs"] == {"before": 3, "after": 2}
    assert data["chance"] < 0.02
    assert data["gate"] is None
    assert len(data["reports"]) == 5
    other = made(tmp_path / "other", size=4)
    assert "--baseline: " in refusal(*words, other)


def test_gate_ends_with_exit_code_for_a_nightly_job(tmp_path):
    before = made(tmp_path / "before", compute=100)
    same = made(tmp_path / "same", compute=103)
    slower = made(tmp_path / "slower", compute=110)
    slow = made(tmp_path / "slow", compute=150)
    assert "passed." in report(before, same, "--gate", "5%").stdout
    assert "passed." in report(slow, before, "--gate", "5%").stdout
    doubtful = report(before, slower, "--gate", "5%")  # 9 % longer, and 6 % may be chance
    assert re.sub(r"[│\s]+", " ", doubtful.stdout).count("passed, but not sure. HINT: --baseline")
    failed = report("--json", before, slow, "--gate", "5%", check=False)
    assert failed.returncode == 1
    gate = json.loads(failed.stdout)["gate"]
    assert gate["verdict"] == "slower"
    assert gate["tolerance"] == 0.05
    assert gate["slower"] - gate["noise"] > 0.05


@pytest.mark.long
def test_gate_refuses_what_it_cannot_compare(tmp_path):
    before = made(tmp_path / "before")
    others = {
        "--gate: a step has": made(tmp_path / "batch", samples=16),
        "has no measured steps. HINT": made(tmp_path / "none", steps=0),
        "--gate: too few steps to know the noise": made(tmp_path / "few", steps=3),
        "--gate compares two records with the same number": made(tmp_path / "ranks", size=4),
    }
    for said, other in others.items():
        assert said in refusal(before, other, "--gate", "5%")
    assert "--gate compares two records" in refusal(before, "--gate", "5%")
    assert "--gate 5 is not understood. HINT" in refusal(before, before, "--gate", "5")


def test_records_of_several_sizes_give_scaling_table(tmp_path):
    folders = [made(tmp_path / f"n{size}", size=size) for size in (1, 2, 4)]
    text = report(*folders).stdout
    assert re.search(r"ranks +1 +2 +4", text)
    for name in ("computation scalability", "global efficiency", "scaling efficiency"):
        assert name in text
    data = json.loads(report("--json", *folders).stdout)
    rows = data["rows"]
    assert [row["ranks"] for row in rows] == [1, 2, 4]
    for row in rows:
        relative = row["global_efficiency"] / rows[0]["global_efficiency"]
        assert relative == pytest.approx(row["scaling_efficiency"], rel=0.01)
    again = made(tmp_path / "again", size=4)
    assert "both have 4 ranks" in refusal(*folders, again)


def test_single_rank_has_no_multi_rank_figures(tmp_path):
    text = report(made(tmp_path / "run", size=1)).stdout
    assert "load balance" not in text
    assert "parallel efficiency" not in text
    assert re.search(r"useful +\d", text)
    data = json.loads(report("--json", tmp_path / "run").stdout)
    assert data["slowest_rank"] is None
    assert data["efficiencies"]["serialisation"] is None


def test_missing_rank_is_reported_and_lowers_confidence(tmp_path):
    folder = made(tmp_path / "run", size=4)
    (folder / "rank-2.ring").unlink()
    text = report(folder).stdout
    assert "no record of rank 2" in text
    assert re.search(r"confidence 0\.\d+", text)
    assert json.loads(report("--json", folder).stdout)["confidence"] < 0.76


def test_too_few_steps_are_reported(tmp_path):
    for steps, words in ((None, "No optimizer step"), (0, "Fewer than two steps")):
        folder = tmp_path / f"steps-{steps}"
        folder.mkdir()
        rank = Rank(folder, 0, 1)
        rank.was(State.FORWARD, 0, 10)
        if steps is not None:
            rank.step(0, 10)
        assert words in report(folder).stdout


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "does not exist"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "has no record"),
        (lambda folder: made(folder / "old", run="b") and _mix(folder), "2 different runs"),
        (lambda folder: _newer(folder), "version 99"),
        (lambda folder: [path.write_bytes(b"x" * 99) for path in folder.iterdir()], "not a record"),
    ],
    ids=["no folder", "empty", "two runs", "newer", "foreign"],
)
def test_invalid_record_folders_are_rejected_with_hint(tmp_path, spoil, words):
    folder = made(tmp_path / "run")
    spoil(folder)
    said = refusal(folder)
    assert words in said
    assert "HINT" in said


@pytest.mark.parametrize(
    ("files", "given", "command"),
    [
        ([f"s/{STUDY_FILE}", "s/runs/n1/record/rank-0.ring"], "s", "scale --show s"),
        ([f"s/{CRITICAL_FILE}"], "s", "scale --show s"),
        (["s.toml", "s.journal", "s.trials/00000/attempt-1.out"], "s.trials", "tune s.toml --show"),
        (["s.toml", "s.journal", "s-2.trials/x"], "s-2.trials", "tune s.toml --show"),
        (["t/s.toml", "t/s.journal"], "t", "tune t/s.toml --show"),
        (["s.toml", "s.journal"], "s.toml", "tune s.toml --show"),
    ],
)
def test_folder_of_a_study_names_the_command_that_shows_it(
    tmp_path, monkeypatch, files, given, command
):
    monkeypatch.chdir(tmp_path)
    for file in map(Path, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    with pytest.raises(ValueError, match=f"HINT: paceline {command}"):
        load_run(Path(given))


def _mix(folder):
    (folder / "old" / "rank-1.ring").rename(folder / "rank-1.ring")
    shutil.rmtree(folder / "old")


def _newer(folder):
    path = folder / "rank-1.ring"
    data = bytearray(path.read_bytes())
    data[8] = 99
    path.write_bytes(data)


def test_damaged_record_is_skipped_and_named(tmp_path):
    folder = made(tmp_path / "run", size=3)
    path = folder / "rank-1.ring"
    path.write_bytes(path.read_bytes()[:17000])
    wide = {"COLUMNS": "400"}  # otherwise long paths wrap anywhere
    text = re.sub(r"[│\s]+", " ", report(folder, **wide).stdout)
    assert "rank-1.ring: is cut off or damaged" in text
    assert "no record of rank 1" in text
    (folder / "rank-2.ring").write_bytes(b"")
    assert "rank-2.ring: is not a record" in re.sub(r"[│\s]+", " ", report(folder, **wide).stdout)


def test_folder_of_attempts_reports_their_names(tmp_path):
    made(tmp_path / "run" / "attempt-0")
    assert "attempt-0, which has one" in refusal(tmp_path / "run")
