"""Learning-rate rules: the scaling factor, the warm-up, and errors."""

import pytest
import torch

from paceline.optim.large_batches import scale_learning_rate


def optimizer(rate=0.1):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def rate(opt):
    return opt.param_groups[0]["lr"]


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rate_is_scaled_by_rule(rule, factor):
    opt = optimizer()
    assert scale_learning_rate(opt, global_batch=256, reference_batch=64, rule=rule) is None
    assert rate(opt) == pytest.approx(0.1 * factor)


def test_warmup_rises_from_original_to_scaled_learning_rate():
    opt = optimizer()
    warmup = scale_learning_rate(opt, global_batch=256, reference_batch=64, warmup=3)
    rates = []
    for _ in range(5):
        rates.append(rate(opt))
        opt.step()
        warmup.step()
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


@pytest.mark.parametrize(
    ("decay", "factors"),
    [
        ("linear", [0.25, 0.625, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("polynomial", [0.25, 0.625, 1, 0.5625, 0.25, 0.0625, 0, 0]),
        ("sqrt", [0.25, 0.625, 1, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5, 3**-0.5, 3**-0.5]),
    ],
)
def test_learning_rate_decays_after_warmup_and_resumes(decay, factors):
    options = {"global_batch": 256, "reference_batch": 64, "warmup": 2, "steps": 6}
    opt = optimizer()
    schedule = scale_learning_rate(opt, decay=decay, **options)
    rates = []
    for step in range(8):
        if step == 3:
            state = schedule.state_dict(), opt.state_dict()
            opt = optimizer()
            schedule = scale_learning_rate(opt, decay="linear", **{**options, "steps": 99})
            opt.load_state_dict(state[1])
            schedule.load_state_dict(state[0])
        rates.append(rate(opt))
        opt.step()
        schedule.step()
    assert rates == pytest.approx([0.4 * factor for factor in factors])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": "cubic", "steps": 9}, "decay must be .*'linear'.*decay='cubic'.*HINT"),
        ({"decay": "linear", "warmup": 9, "steps": 9}, "more steps than warmup=9.*steps=9"),
        ({"rule": "cubic"}, "rule must be one of 'linear', 'sqrt'; this is 'cubic'. HINT"),
        ({"reference_batch": 0}, "reference_batch=0.*HINT"),
        ({"warmup": -1}, "warmup must be at least 0; this is -1. HINT"),
        ({"warmup": 2.5}, "warmup must be an int; this is 2.5. HINT"),
        ({"global_batch": "64"}, "global_batch must be an int; this is '64'. HINT"),
    ],
)
def test_invalid_learning_rate_options_are_rejected(options, message):
    options = {"global_batch": 8, "reference_batch": 8} | options
    with pytest.raises(ValueError, match=message):
        scale_learning_rate(optimizer(), **options)
