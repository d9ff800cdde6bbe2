"""Time to a target: samples to the target over throughput, by size."""

import dataclasses

import pytest

from paceline.analyze.scaling.outcomes.batch_advice import batch_advice
from paceline.analyze.scaling.outcomes.targets import (
    LINEAR,
    NO_RULE,
    SQUARE_ROOT,
    UNCHANGED,
    cheapest,
    learning_rate_rule,
    soonest,
    targets,
)
from paceline.analyze.scaling.study_model import STRONG, WEAK, NoiseFigures
from paceline.report.scaling.study_document import batch_sentences
from studies import make_point, make_study, reach


def study_of(ends, hosts=(1, 1, 2)):
    """A weak study on 1, 2 and 4 ranks whose runs ended as ``ends`` says."""
    points = [
        make_point(WEAK, ranks, targets=of_size, hosts=nodes, spread=0.0)
        for ranks, of_size, nodes in zip((1, 2, 4), ends, hosts, strict=True)
    ]
    return dataclasses.replace(
        make_study((1, 2, 4), (WEAK,), until="accuracy>=0.97"), points=points
    )


def test_time_is_samples_over_throughput():
    study = study_of([[reach(10_000)] * 3, [reach(10_000)] * 3, [reach(80_000)] * 3])
    one, two, four = targets(study, WEAK)
    assert one.seconds.value == pytest.approx(10_000 / 1000)
    assert (one.statistical_efficiency.value, four.statistical_efficiency.value) == (1.0, 0.125)
    assert four.node_hours.value == pytest.approx(2 * four.seconds.value / 3600)
    # Four ranks are faster in samples/s, and need longer until the target.
    assert soonest([one, two, four]) is two
    assert cheapest([one, two, four]) is two
    assert targets(study, STRONG) == []


def test_size_of_which_a_seed_fails_is_not_the_soonest():
    miss = reach(50_000, reached=False, best=0.91)
    study = study_of([[reach(10_000)] * 3, [reach(1_000)] * 2 + [miss], [miss] * 3])
    one, two, four = targets(study, WEAK)
    assert (two.reached, two.seeds, two.samples.value) == (2, 3, 1_000)
    assert soonest([one, two, four]) is one
    assert (four.samples, four.seconds, four.best) == (None, None, 0.91)


def test_interval_contains_the_spread_between_seeds():
    study = study_of([[reach(n) for n in (9_000, 10_000, 11_000)]] * 3)
    one = targets(study, WEAK)[0]
    assert one.samples.low < 9_500 < 10_500 < one.samples.high
    assert one.seconds.high / one.seconds.value >= one.samples.high / one.samples.value


def with_noise(study, scales):
    """Give the runs of each size a noise scale with an interval of 10 %; None: not measured."""

    def figures_with(figures, scale):
        if scale is None:
            return figures
        known = scale > 0  # 0: undetermined
        noise = NoiseFigures(
            scale if known else None, 0.9 * scale, 1.1 * scale if known else None, 64, 40
        )
        return dataclasses.replace(figures, noise=noise)

    points = [
        dataclasses.replace(
            point,
            runs=[
                dataclasses.replace(run, figures=figures_with(run.figures, scale))
                for run in point.runs
            ],
        )
        for point, scale in zip(study.points, scales, strict=True)
    ]
    return dataclasses.replace(study, points=points)


def test_noise_scale_says_steps_and_samples_of_larger_batches_with_a_band():
    study = with_noise(study_of([[reach(1_000)] * 3] * 3), [None, 128.0, 128.0])
    said = batch_sentences(batch_advice(study, WEAK))
    assert said[0] == (
        "Gradient noise scale: 128 samples (95 %: 115 to 141; median of 6 runs). Relative to a "
        "batch of 64, to the same loss:"
    )
    # (1 + 128/256) / (1 + 128/64), and (128 + 256) / (128 + 64)
    assert said[2].startswith("  4 ranks, batch 256: 0.50 (")
    assert " of the steps, 2.00 (" in said[2]
    low, high = batch_advice(study, WEAK).larger[1].samples[1:]
    assert low < 2.0 < high


def test_undetermined_noise_scale_gives_no_number():
    study = with_noise(study_of([[reach(1_000)] * 3] * 3), [0.0, 0.0, 128.0])
    (said,) = batch_sentences(batch_advice(study, WEAK))
    assert said.startswith("Gradient noise scale: undetermined in most of 9 runs")
    assert "HINT: paceline scale --critical-batch" in said
    assert targets(study, WEAK)[1].predicted_efficiency is None
    assert batch_advice(study_of([[reach(1_000)] * 3] * 3), WEAK) is None


def test_noise_scale_predicts_the_statistical_efficiency():
    study = with_noise(study_of([[reach(1_000)] * 3] * 3), [None, 120.0, 136.0])
    found = targets(study, WEAK)
    # batches of 64, 128 and 256; the median noise scale is 128
    assert [one.predicted_efficiency for one in found] == pytest.approx([1.0, 1.5 / 2, 1.5 / 3])
    assert targets(study_of([[reach(1_000)] * 3] * 3), WEAK)[1].predicted_efficiency is None


@pytest.mark.parametrize(
    ("rates", "rule"),
    [
        ([0.1, 0.2, 0.4], LINEAR),
        ([0.1, 0.1, 0.1], UNCHANGED),
        ([0.1, 0.1414, 0.2], SQUARE_ROOT),
        ([0.1, 0.3, 0.4], NO_RULE),
        ([None, None, 0.1], None),
    ],
)
def test_learning_rate_rule(rates, rule):
    ends = [[dataclasses.replace(reach(1_000), learning_rate=rate)] * 3 for rate in rates]
    assert learning_rate_rule(targets(study_of(ends), WEAK)) == rule
