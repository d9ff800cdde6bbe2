"""Remedies of what bends a scaling curve, from the record of the larger size alone."""

from types import SimpleNamespace

import pytest

from paceline.analyze.scaling.bends import Bend, GrownLoss
from paceline.analyze.scaling.costs import PARTS, SizeCosts
from paceline.knobs.registry import KNOBS
from paceline.predict.remedies import propose

REPORT = SimpleNamespace(
    losses=[],
    groups=[],
    hosts=["a"] * 4,
    size=4,
    steps=50,
    places=[SimpleNamespace(device="cpu")],
    states=[{"useful": 0.6, "starved": 0.0, "other": 0.0}] * 4,
)


def costs() -> SizeCosts:
    nothing = dict.fromkeys(PARTS, 0.0)
    return SizeCosts(4, 1, 4, 64, 1, 16.0, 0.1, 0.002, nothing, nothing)


def bend(*losses: tuple[str, float], real: bool = True, calls: float = 1.0) -> Bend:
    """Return a bend with these losses: cause, and share of the larger size's step."""
    grown = [
        GrownLoss(cause, 0.5, 0.1, 0.01, share, share / (1 - share), None, cause, calls)
        for cause, share in losses
    ]
    return Bend("strong", 2, 4, 0.9, 0.7, real, grown)


def found(*losses: tuple[str, float], script: str = "", **options: object) -> dict[str, object]:
    return {one.knob: one for one in propose(bend(*losses, **options), costs(), REPORT, script)}


def test_remedies_are_those_that_diagnose_proposes_for_the_cause() -> None:
    for cause in ("validation-on-one-rank", "jitter", "exchange-latency", "input", "slow-rank"):
        proposed = found((cause, 0.2))
        assert proposed
        assert all(cause in KNOBS[knob].answers for knob in proposed)


def test_a_validation_on_one_rank_gains_what_the_other_ranks_can_take_over() -> None:
    one = found(("validation-on-one-rank", 0.2))["validate-on-all"]
    assert one.gain == pytest.approx(0.15 / 0.85)  # 3 of 4 parts of 20 % of a step
    assert one.at_most == pytest.approx(0.2 / 0.8)


def test_many_small_exchanges_become_one() -> None:
    one = found(("exchange-latency", 0.3), calls=10.0)["one-exchange"]
    assert one.gain == pytest.approx(0.27 / 0.73)
    unknown = found(("exchange-latency", 0.3), calls=10.0)["exchange"]
    assert unknown.gain is None
    assert unknown.settable


def test_the_largest_loss_comes_first_and_small_ones_have_no_remedy() -> None:
    losses = (("validation", 0.2), ("exchange-latency", 0.1), ("jitter", 0.01))
    causes = [one.cause for one in propose(bend(*losses), costs(), REPORT)]
    assert causes == sorted(causes, key=["validation", "exchange-latency"].index)
    assert set(causes) == {"validation", "exchange-latency"}


def test_settings_of_nccl_are_proposed_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(knob.startswith("nccl") for knob in found(("exchange-latency", 0.3)))
    monkeypatch.setattr(REPORT, "places", [SimpleNamespace(device="cuda 0")])
    assert "nccl-algorithm" in found(("exchange-latency", 0.3))


def test_noise_has_no_remedy() -> None:
    assert not found(("validation", 0.2), real=False)


def test_the_line_of_the_script_is_named_if_it_is_the_only_one() -> None:
    script = "model.train()\nfor step in range(9):\n    dist.all_reduce(loss)\n"
    one = found(("exchange-latency", 0.3), script=script, calls=10.0)["one-exchange"]
    assert one.line == 3
