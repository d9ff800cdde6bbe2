"""The critical batch from losses at equal samples: the result, its band, and the noise scale."""

import json
import math
import re

import numpy as np
import pytest

from paceline.analyze.scaling.critical.critical_model import (
    BranchPoint,
    BranchRun,
    CriticalRequest,
    StoredCritical,
    read_critical,
    write_critical,
)
from paceline.analyze.scaling.critical.judgement import AGREES, LARGER, SMALLER, end_loss, judge
from paceline.report.page.write_page import document_page
from paceline.report.scaling.critical_report import (
    critical_charts,
    critical_document,
    critical_json,
    critical_sentences,
)
from paceline.report.terminal.draw import print_panel

BATCH, STEPS = 32, 64
POINT = BranchPoint(100, BATCH, 1, ["SGD"], "linear", STEPS, 1.0, 0.01)


def run_of(multiple, seed, loss, **more):
    """Return a run whose loss falls to ``loss``; its first steps are much higher."""
    count = STEPS // multiple
    samples = [BATCH * multiple * (i + 1) for i in range(count)]
    losses = [loss + (3.0 if i < count / 2 else 0.0) for i in range(count)]
    return BranchRun(multiple, seed, samples=samples, losses=losses, **more)


def measured(above, seeds=3, spread=0.001, ranks=2, **noise):
    """Return a measurement with these relative differences, by multiple."""
    draw = np.random.default_rng(1)
    base = [1.0 + 0.1 * seed for seed in range(seeds)]  # seeds differ by more than the batches
    request = CriticalRequest("train.py", [], "/", ranks, [1, *above], seeds=seeds)
    runs = [run_of(1, seed, loss, **noise) for seed, loss in enumerate(base)]
    for multiple, of in above.items():
        middle = float(np.mean(base))
        runs += [
            run_of(multiple, seed, loss + middle * (of + draw.normal(0, spread)))
            for seed, loss in enumerate(base)
        ]
    stored = StoredCritical.new(request)
    return StoredCritical(stored.format, stored.version, request, POINT, runs)


def noise_rows(scale, small=16, steps=200):
    """Return sampled steps of gradients with this noise scale."""
    draw, dims, rows = np.random.default_rng(0), 400, []
    mean = np.full(dims, math.sqrt(1 / dims))
    for _ in range(steps):
        each = mean + draw.normal(0, math.sqrt(scale / dims / small), (2, dims))
        of_rank, of_all = (each**2).sum(1).mean(), (each.mean(0) ** 2).sum()
        rows.append((small, 2 * small, float(of_rank), float(of_all)))
    return rows


def test_largest_batch_within_the_tolerance_is_critical_with_a_band():
    found = judge(measured({2: 0.001, 4: 0.006, 8: 0.05}))
    assert (found.batch, found.high, found.is_largest) == (4 * BATCH, 8 * BATCH, False)
    assert found.low in (2 * BATCH, 4 * BATCH)
    # a difference is that of runs of one seed: the seeds differ by ten times the tolerance
    assert found.results[3].difference == pytest.approx(0.05, abs=0.002)
    assert found.results[3].low > 0.04


def test_losses_before_the_last_quarter_do_not_count():
    assert end_loss(run_of(4, 0, 0.5), BATCH * STEPS) == pytest.approx(0.5)
    assert math.isinf(end_loss(BranchRun(1, 0, samples=[1.0, 2.0], losses=[1.0, None]), 2.0))


def test_band_is_wide_if_seeds_disagree():
    found = judge(measured({2: 0.009, 4: 0.011}, spread=0.02))
    assert found.low == BATCH
    assert found.high is None


def test_batch_that_diverges_is_above_and_one_that_fails_leaves_it_unknown():
    stored = measured({2: 0.001})
    request = CriticalRequest("train.py", [], "/", 2, [1, 2, 4], seeds=3)

    def with_run(run):
        return StoredCritical(stored.format, 1, request, POINT, [*stored.runs, run])

    diverged = judge(with_run(BranchRun(4, 0, failure="the loss is not finite", diverged=True)))
    assert (diverged.batch, diverged.high) == (2 * BATCH, 4 * BATCH)
    failed = judge(with_run(BranchRun(4, 0, failure="out of memory")))
    assert failed.batch is None
    assert "Critical batch: not known" in critical_sentences(with_run(stored.runs[0]), failed)[0]


def test_base_itself_may_be_too_large_and_all_batches_may_be_good():
    assert judge(measured({2: 0.03, 4: 0.001})).batch == BATCH
    stored = measured({2: 0.001, 4: 0.001})
    found = judge(stored)
    assert found.is_largest
    assert "at least 128 samples" in critical_sentences(stored, found)[0]


def test_one_seed_has_no_band_and_says_so():
    stored = measured({2: 0.001, 4: 0.05}, seeds=1)
    found = judge(stored)
    assert (found.batch, found.low, found.high) == (2 * BATCH, BATCH, None)
    assert any("HINT: --seeds 3" in line for line in critical_sentences(stored, found))


@pytest.mark.parametrize(
    ("scale", "against"), [(90, AGREES), (8, SMALLER), (4000, LARGER)], ids=str
)
def test_noise_scale_is_judged_against_the_measured_batch(scale, against):
    stored = measured({2: 0.001, 4: 0.05}, noise=noise_rows(scale))
    found = judge(stored)
    assert found.noise.samples == pytest.approx(scale, rel=0.6)
    assert found.against_noise == against


def test_undetermined_noise_scale_is_no_number():
    rows = [
        (b, 2 * b, s, s / 2 * (1 + (-1) ** i * 0.02)) for i, (b, s) in enumerate([(16, 1.0)] * 60)
    ]
    stored = measured({2: 0.001}, noise=rows)
    found = judge(stored)
    assert (found.noise.samples, found.against_noise) == (None, None)
    assert "Gradient noise scale: undetermined" in critical_sentences(stored, found)[1]
    assert critical_json(stored, found)["noise_scale"]["samples"] is None


def test_one_rank_has_no_noise_scale_and_the_way_out():
    stored = measured({2: 0.001}, ranks=1)
    assert "HINT: -n 2" in critical_sentences(stored, judge(stored))[1]


def test_file_table_and_page_show_the_result(tmp_path, capsys):
    stored = measured({2: 0.001, 4: 0.05}, noise=noise_rows(90))
    write_critical(tmp_path, stored)
    assert read_critical(tmp_path) == stored
    found = judge(stored)
    document = critical_document(stored, found)
    page = document_page(document, critical_charts(stored, found))
    assert '"name":"128 samples"' in page
    assert "as good" in page
    assert "64 samples, 2 times the base" in page
    print_panel(lambda _: document)
    text = capsys.readouterr().out
    assert "Paceline: critical batch" in text
    assert re.search(r" 64 +2 +x .* as good", text)


def test_without_a_run_of_the_base_there_is_no_result():
    stored = measured({2: 0.001})
    empty = StoredCritical(stored.format, 1, stored.request, POINT, stored.runs[3:])
    with pytest.raises(ValueError, match="HINT: paceline scale --continue"):
        judge(empty)


def test_damaged_file_is_refused(tmp_path):
    stored = measured({2: 0.001})
    write_critical(tmp_path, stored)
    file = tmp_path / "critical-batch.json"
    tree = json.loads(file.read_text())
    tree["runs"][0]["losses"].pop()
    file.write_text(json.dumps(tree))
    with pytest.raises(ValueError, match="contradicts itself"):
        read_critical(tmp_path)
