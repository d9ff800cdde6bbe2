"""The largest memory of a rank, and what models and optimizers take of it."""

import json

from records import Rank, report_of

from paceline.record.ring.states import Memory, State
from paceline.report.sentences import peak_sentence
from paceline.report.terminal.run_report import render

MIB = 1 << 20
TENSORS = {
    "layout": "zero2",
    "parameters": 40 * MIB,
    "buffers": 0,
    "gradients": 40 * MIB,
    "optimizer_states": 80 * MIB,
}


def rank_of(folder, number, peak, **tensors):
    rank = Rank(folder, number, 2, tensors=TENSORS | tensors)
    for i, mib in enumerate((100, peak, 200)):
        rank.was(State.MEMORY, i, i, amount=mib * MIB, peer=Memory.HOST)
        rank.was(State.MEMORY, i, i, amount=9000 * MIB, peer=Memory.HOST_AVAILABLE)
        rank.step(10 * i, 10 * i + 10, number=i)
    return rank


def test_largest_rank_and_its_parts(tmp_path):
    report = report_of([rank_of(tmp_path, 0, 400), rank_of(tmp_path, 1, 500)])
    assert [(peak.rank, peak.bytes // MIB, peak.rest // MIB) for peak in report.peaks] == [
        (1, 500, 340),
        (0, 400, 240),
    ]
    assert peak_sentence(report) == (
        "Largest host memory, of rank 1 (host) with layout zero2: 500 MiB (parameters 40 MiB, "
        "gradients 40 MiB, optimizer states 80 MiB, rest 340 MiB)"
    )
    assert json.loads(report.to_json())["peaks"][0]["optimizer_states"] == 80 * MIB
    assert "Largest host memory" not in render(report)  # the short report has it with a prediction


def test_device_and_prediction(tmp_path):
    about = {"device_peak": 700 * MIB, "predicted_peak": 650 * MIB}
    report = report_of([rank_of(tmp_path, 0, 400, **about), rank_of(tmp_path, 1, 500, **about)])
    assert report.peaks[0].kind == "device"
    assert peak_sentence(report).endswith("rest 540 MiB); predicted: 650 MiB")
    assert "Largest device memory" in render(report)


def test_what_is_offloaded_is_beside_the_device_memory(tmp_path):
    about = {"device_peak": 700 * MIB, "optimizer_states": 0, "offloaded": 80 * MIB}
    report = report_of([rank_of(tmp_path, 0, 400, **about)])
    assert peak_sentence(report).endswith("rest 620 MiB); 80 MiB offloaded to the host")
    assert json.loads(report.to_json())["peaks"][0]["offloaded"] == 80 * MIB


def test_record_without_tensors_has_no_peak(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.was(State.MEMORY, 0, 0, amount=MIB, peer=Memory.HOST)
    rank.step(0, 10)
    report = report_of([rank])
    assert report.peaks == []
    assert peak_sentence(report) == ""
