"""Commands that write a file and print: the file is written, although nothing reads the output."""

import os
from types import SimpleNamespace

import pytest
import torch
import typer
from records import Rank

from paceline.checkpoint.saver import CheckpointSaver
from paceline.checkpoint.shared_state import SharedState
from paceline.cli import app
from paceline.cost.machine import machine_file
from paceline.cost.machine.machine_file import Machine
from paceline.data.packing.pack import pack
from paceline.report.document import Line

GROUP = typer.main.get_command(app)


def _write_inputs(folder):
    (folder / "files").mkdir()
    for number in range(3):
        (folder / "files" / f"{number}.bin").write_bytes(bytes(100))
    pack(folder / "files", folder / "packed", workers=1)
    saver = CheckpointSaver(folder / "model", 0, 1, None, pytest.fail)
    saver.save(1, SharedState({"models": [{"x": torch.zeros(1)}]}), {}, {})
    saver.wait()
    (folder / "record").mkdir()
    Rank(folder / "record", 0, 1).step(0, 1)
    machine_file.save(_machine(), folder / "old.toml")


def _machine(**more):
    return Machine(made="2026-01-01T00:00:00+00:00", hosts=(), **more)


def _print_to_closed_pipe(monkeypatch, words):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        GROUP.main(words, standalone_mode=False)


@pytest.mark.parametrize("json", [(), ("--json",)])
@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("pack files out", "out/paceline.json"),
        ("pack packed out --to webdataset", "out/*.tar"),
        ("stage packed staged", "staged/**/paceline.json"),
        ("convert model out.safetensors", "out.safetensors"),
        ("report record --html page.html", "page.html"),
        ("check --out new.toml", "new.toml"),
        ("bench comm --machine old.toml", "old.toml"),
    ],
)
def test_files_are_written_before_results_are_printed(tmp_path, monkeypatch, words, written, json):
    _write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    if words.startswith("check"):
        checked = SimpleNamespace(machine=_machine(), notes=[], more={}, code=0)
        monkeypatch.setattr("paceline.study.measuring_jobs.check", lambda _: checked)
    if words.startswith("bench"):
        found = SimpleNamespace(collectives=[], copies=[], notes=[])
        monkeypatch.setattr("paceline.study.measuring_jobs.bench", lambda *_: found)
        monkeypatch.setattr(
            "paceline.report.terminal.check.bench_blocks", lambda *_: [Line("figures")]
        )
        monkeypatch.setattr(
            "paceline.study.measuring_jobs.merge_collectives", lambda *_: _machine(command="new")
        )
    before = {path: path.stat().st_ino for path in tmp_path.glob(written)}
    with pytest.raises((BrokenPipeError, SystemExit)):  # rich exits itself
        _print_to_closed_pipe(monkeypatch, [*words.split(), *json])
    after = {path: path.stat().st_ino for path in tmp_path.glob(written)}
    assert after
    assert after != before
