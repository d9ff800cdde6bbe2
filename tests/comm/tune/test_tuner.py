"""The tuner finds faster exchange settings in a job's first steps; the model does not change."""

import json
import random
import tomllib

import pytest
import ranks
import scripts
import torch
import torch.distributed as dist

from paceline.comm.tune import saved_settings
from paceline.comm.tune.choice import GLOO, PACELINE, ExchangeSettings
from paceline.comm.tune.successive_halving import (
    MAX_CANDIDATES,
    WARM_UP_STEPS,
    TuningResult,
    halving,
    max_steps,
)
from paceline.comm.tune.tuner import (
    MIB,
    AllReduceCost,
    ReadyGradient,
    buckets,
    finish_time,
    likely_settings,
)
from paceline.knobs.settings import settings_for_script

DEFAULT = ExchangeSettings(None, GLOO)
MINE = {"ranks": 4, "hosts": 2, "compression": False}
OTHERS = [ExchangeSettings(float(mib), PACELINE) for mib in range(1, 1 + MAX_CANDIDATES)]


def searched(seconds, others=OTHERS):
    """Search with a step time of ``seconds(choice)``; return the verdict and the steps taken."""
    search, steps, before = halving(DEFAULT, others), 0, DEFAULT
    try:
        ask = next(search)
        while True:
            steps += ask.steps + WARM_UP_STEPS * (ask.choice != before)
            before = ask.choice
            ask = search.send(seconds(before))
    except StopIteration as end:
        return end.value, steps


@pytest.mark.parametrize("count", range(MAX_CANDIDATES + 1))
def test_fastest_setting_is_found_within_max_steps(count):
    took = {choice: 1.0 - 0.1 * at for at, choice in enumerate(OTHERS)} | {DEFAULT: 1.05}
    verdict, steps = searched(took.__getitem__, OTHERS[:count])
    same = 2 * WARM_UP_STEPS  # a round may begin with the previous round's last choice
    assert max_steps(count) - same <= steps <= max_steps(count) <= 64
    assert verdict.is_faster == (count > 0)
    assert verdict.choice == (OTHERS[count - 1] if count else DEFAULT)


def test_slower_setting_is_not_kept():
    verdict, _ = searched(lambda choice: 1.0 if choice == DEFAULT else 1.001)
    assert (verdict.is_faster, verdict.choice) == (False, DEFAULT)


def test_inconsistently_faster_setting_is_not_kept():
    told = iter([1.0] * 9 + [1.0, 0.9, 0.9, 1.0, 0.9, 1.0])  # slower in one of the three pairs
    verdict, _ = searched(lambda choice: next(told))
    assert verdict.step_s < verdict.default_step_s
    assert not verdict.is_faster


@pytest.mark.parametrize(
    ("percent", "is_kept"),
    [((5, 6, 4), True), ((1, 1.1, 0.9), True), ((-1, 10, 12), True), ((1, 2, 20), False)],
)
def test_setting_is_kept_if_it_is_faster_by_more_than_the_noise_of_the_pairs(percent, is_kept):
    rungs = [1.0] * 9
    (a, b, c) = (1 / (1 + one / 100) for one in percent)
    told = iter([*rungs, 1.0, a, b, 1.0, 1.0, c])
    assert searched(lambda choice: next(told))[0].is_faster == is_kept


def test_search_is_robust_to_noise():
    """Step times of 0.7 to 1.0 times the default, with noise of 5% up and down."""
    chance, missed = random.Random(0), 0
    for _ in range(300):
        took = {choice: chance.uniform(0.7, 1.0) for choice in OTHERS} | {DEFAULT: 1.0}
        verdict, _ = searched(lambda choice, took=took: took[choice] * chance.uniform(0.95, 1.05))
        missed += took[verdict.choice] > 1.05 * min(took.values())
    assert missed < 45


@pytest.mark.parametrize("kept_", [True, False])
@pytest.mark.parametrize(
    "best",
    [
        ExchangeSettings(2.5, "ring"),
        ExchangeSettings(4.0, PACELINE, True),
        ExchangeSettings(3.0, GLOO),
        ExchangeSettings(7.0),
    ],
)
def test_saved_settings_round_trip(tmp_path, best, kept_):
    path = tmp_path / "tuned.toml"
    assert saved_settings.load_settings(path, MINE, DEFAULT) == (None, "")
    saved_settings.save_settings(
        path, TuningResult(DEFAULT, best, 0.9, 1.0, kept_), MINE, "train.py"
    )
    assert saved_settings.load_settings(path, MINE, DEFAULT) == (best if kept_ else DEFAULT, "")
    other, said = saved_settings.load_settings(path, MINE | {"compression": True}, DEFAULT)
    assert other is None
    assert said == f"{path} was made with compression = False, and this run has True"
    knobs, notes = settings_for_script(path, "train.py")
    assert (knobs, notes) == (best.to_knobs() if kept_ else {}, [])


def test_bucket_assignment_matches_ddp():
    chance = random.Random(1)
    for _ in range(50):
        sizes = [chance.choice((1, 10, 300, 5000)) for _ in range(chance.randint(1, 40))]
        caps = [chance.randint(1, 30_000) for _ in range(chance.randint(1, 3))]
        tensors = [torch.empty(size) for size in sizes]
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, caps)
        found = buckets([ReadyGradient(at, 4 * size) for at, size in enumerate(sizes)], caps)
        assert [one.nbytes for one in found] == [sum(4 * sizes[i] for i in one) for one in expected]
        assert [one.at for one in found] == [max(one) for one in expected]


def test_finish_time_counts_exposed_communication():
    seconds = AllReduceCost({1000: 0.5, 3000: 1.5})
    assert seconds(500) == 0.5
    assert seconds(2000) == 1.0
    assert seconds(5000) == 2.5
    gradients = [ReadyGradient(1.0, 1000), ReadyGradient(2.0, 1000), ReadyGradient(4.0, 1000)]
    assert finish_time(buckets(gradients, [1000]), seconds) == 4.5  # two overlap with the backward
    assert finish_time(buckets(gradients, [2000]), seconds) == 4.5
    assert finish_time(buckets(gradients, [3000]), seconds) == 5.5  # one bucket, after the backward
    slow = AllReduceCost({1000: 2.0, 3000: 2.0})
    assert finish_time(buckets(gradients, [1000]), slow) == 7.0  # buckets wait for each other
    assert finish_time(buckets(gradients, [3000]), slow) == 6.0


def test_likely_bucket_size_depends_on_backward_time():
    ways = {
        PACELINE: AllReduceCost({MIB: 0.010, 8 * MIB: 0.080}),
        GLOO: AllReduceCost({MIB: 0.1, 8 * MIB: 0.9}),
    }

    def first(backward):
        gradients = [ReadyGradient(backward * at / 32, MIB // 2) for at in range(32)]
        found = likely_settings(gradients, ways, DEFAULT)
        assert 0 < len(found) <= MAX_CANDIDATES
        assert len({(one.mib, one.method) for one in found}) == len(found)
        assert found[0].method == PACELINE
        return found[0].mib

    latency = {PACELINE: AllReduceCost({MIB: 0.1, 8 * MIB: 0.11})}
    gradients = [ReadyGradient(1e-3 * at, MIB // 2) for at in range(32)]
    assert likely_settings(gradients, latency, DEFAULT)[0].mib > 16
    assert first(0.2) <= 2


# The layers are not called in the order in which they are registered.
SET = """
    import sys
    import torch, torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
    from paceline.comm.tune.tuner import BucketRebuilder

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = torch.nn.Linear(64, 16), torch.nn.Linear(32, 128)
            self.middle = torch.nn.Linear(128, 64)

        def forward(self, x):
            return self.last(self.middle(self.first(x)))

    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.03, **eval(sys.argv[1]))

    def step():
        model(torch.randn(4, 32)).sum().backward()

    for _ in range(3):
        step()
    before = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    buckets = BucketRebuilder(model)
    told = [[one.at for one in buckets.ready_gradients()]]
    dist.broadcast_object_list(told, src=0)
    buckets.set_order(told[0])
    buckets.rebuild(None)
    sizes = []

    def hook(_, bucket):
        sizes.append(4 * bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    step()
    first = list(sizes)
    step()
    if dist.get_rank() == 0:
        print([[int(one) for one in before.split(",")], first, sizes[len(first):]])
    """


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_buckets_are_set_from_first_step(tmp_path, options):
    """DDP itself rebuilds its buckets only after the first step."""
    (told,) = ranks.untagged(ranks.run(ranks.write(tmp_path, SET), options).stdout)
    before, first, second = json.loads(told)
    assert len(before) > 1
    assert first == second == before


TRAIN = """
    import contextlib, sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    kind, steps, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    options = {
        "views": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
    }.get(kind, {})
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(8 if kind == "deeper" else 6)]
    net = torch.nn.Sequential(*layers)
    net.register_parameter("idle", torch.nn.Parameter(torch.ones(7)) if kind == "unused" else None)
    model = DistributedDataParallel(net, **options)
    if kind == "other torch":
        def made_otherwise(*_):
            raise RuntimeError("made otherwise")
        DistributedDataParallel._ddp_init_helper = made_otherwise
    if kind == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    torch.manual_seed(1 + dist.get_rank())
    join = model.join() if kind == "join" else contextlib.nullcontext()
    with join:
        for step in range(steps + (kind == "join") * dist.get_rank()):
            optimizer.zero_grad(set_to_none=kind != "views")
            if kind == "accumulates":
                with model.no_sync():
                    model(torch.randn(8, 64)).square().mean().backward()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            if kind == "plain":
                with torch.no_grad():
                    model(torch.randn(8, 64))
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), out)
    dist.destroy_process_group()
    """


def trained(folder, kind, *options, steps=100):
    """Train with these options of ``paceline run``; return the model and the messages."""
    out = folder / "model.pt"
    script = ranks.write(folder, TRAIN)
    done = ranks.run(script, kind, steps, out, launcher=" ".join(["paceline", *map(str, options)]))
    return torch.load(out), done.stderr


OTHER_KINDS = ("views", "static", "unused", "accumulates")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "kind",
    ["plain", *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHER_KINDS)],
)
def test_tuning_keeps_training_bitwise_equal(tmp_path, kind):
    """The model is the same while buckets and methods change, and after that.

    Two ranks, because a sum over two ranks has only one order.
    """
    expected, _ = trained(tmp_path, kind)
    found, said = trained(tmp_path, kind, "--tune-exchange", tmp_path / "tuned.toml")
    assert "paceline: the exchange is tuned after " in said, said
    assert same(found, expected)
    tree = tomllib.loads((tmp_path / "tuned.toml").read_text())
    assert tree["made"]["ranks"] == 2
    again, said = trained(tmp_path, kind, "--tune-exchange", tmp_path / "tuned.toml")
    assert f"paceline: the exchange uses the settings of {tmp_path}/tuned.toml: " in said
    assert "is tuned" not in said
    assert same(again, expected)
    settings, said = trained(tmp_path, kind, "--settings", tmp_path / "tuned.toml")
    assert "ignored" not in said
    assert same(settings, expected)


@pytest.mark.long
def test_tuning_keeps_training_with_init_bitwise_equal(tmp_path):
    """The buckets of ``paceline.init().distribute`` are final from the start."""
    script, args = ranks.write(tmp_path, scripts.TRAIN), ["--samples", 400, "--epochs", 5]
    ranks.run(script, tmp_path / "plain.pt", *args)
    found = [torch.load(tmp_path / "plain.pt")]
    for said in ("the exchange is tuned after ", "the exchange uses the settings of "):
        launcher = f"paceline --tune-exchange {tmp_path / 'tuned.toml'}"
        done = ranks.run(script, tmp_path / "tuned.pt", *args, launcher=launcher)
        assert said in done.stderr, done.stderr
        found.append(torch.load(tmp_path / "tuned.pt"))
    for one in found[1:]:
        assert one["figures"] == found[0]["figures"]
        assert same(one["model"], found[0]["model"])


@pytest.mark.long
def test_saved_settings_of_different_model_are_ignored(tmp_path):
    tuned = tmp_path / "tuned.toml"
    trained(tmp_path, "plain", "--tune-exchange", tuned)
    expected, _ = trained(tmp_path, "deeper")
    found, said = trained(tmp_path, "deeper", "--tune-exchange", tuned)
    reason = f"paceline: {tuned} was made with gradients = 12, and this run has 16; "
    assert f"{reason}the exchange is tuned again\n" in said
    assert "the exchange is tuned after " in said
    assert same(found, expected)
    assert tomllib.loads(tuned.read_text())["made"]["gradients"] == 16


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "steps", "why"),
    [
        ("hook", 100, "is not tuned: the model has a communication hook"),
        ("other torch", 100, f"is not tuned: torch {torch.__version__}: made otherwise"),
        ("join", 100, "is not tuned: ranks may end at different steps (model.join())"),
        (
            "plain",
            12,
            "--tune-exchange: the script ended in step 11, before the tuning was complete",
        ),
    ],
)
def test_untunable_training_is_reported_and_unchanged(tmp_path, kind, steps, why):
    expected, _ = trained(tmp_path, kind, steps=steps)
    tuned = tmp_path / "tuned.toml"
    found, said = trained(tmp_path, kind, "--tune-exchange", tuned, steps=steps)
    assert said.count(why) == 1, said
    assert not tuned.exists()
    assert same(found, expected)


@pytest.mark.long
def test_tuning_without_ddp_is_reported(tmp_path):
    script = ranks.write(tmp_path, "print('done')")
    done = ranks.run(script, launcher=f"paceline --tune-exchange {tmp_path / 'tuned.toml'}")
    assert "--tune-exchange: no DistributedDataParallel made a step" in done.stderr
    assert not (tmp_path / "tuned.toml").exists()


@pytest.mark.long
def test_tune_compression_tries_bfloat16(tmp_path):
    """With --tune-compression, bfloat16 is tried and changes the model slightly."""
    tuned = tmp_path / "tuned.toml"
    found, said = trained(tmp_path, "plain", "--tune-exchange", tuned, "--tune-compression")
    expected, _ = trained(tmp_path, "plain")
    assert "the exchange is tuned after " in said
    assert not same(found, expected)  # some steps used bfloat16
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0.1, atol=0.02)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tune-compression"], "needs --tune-exchange. HINT: add --tune-exchange FILE"),
        (["--tune-exchange", "there/tuned.toml"], "is not a folder. HINT: name a file in a folder"),
        (["--tune-exchange", "other.toml"], "--tune-exchange did not write it"),
        (
            ["--tune-exchange", "tuned.toml", "--settings", "other.toml"],
            "--tune-exchange searches for bucket-mb, which a setting fixes",
        ),
    ],
)
def test_invalid_tuning_options_are_reported_before_ranks_start(tmp_path, options, said):
    other = 'format = "paceline-settings"\nversion = 1\n[knobs]\nbucket-mb = 3\n'
    (tmp_path / "other.toml").write_text(other)
    script = ranks.write(tmp_path, "open('ran', 'w')")
    words = [str(tmp_path / word) if word.endswith("toml") else word for word in options]
    done = ranks.run(script, launcher=" ".join(["paceline", *words]), check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "other.toml").read_text() == other


@pytest.mark.long
@pytest.mark.parametrize("layout", ["host1:1,host2:1", "host1:2,host2:1,host3:1"])
def test_tuning_between_hosts_tries_algorithms(hosts, shared_folder, layout):
    """The model is the same to rounding: the sums of several hosts have several orders."""
    script = ranks.write(shared_folder, TRAIN)
    start = [ranks.PACELINE, "run", "--fresh", "-H", layout]

    def run(*words):
        out = shared_folder / "model.pt"
        done = hosts.run("host0", *start, *words, script, "plain", 100, out, cwd=shared_folder)
        return torch.load(out), done.stderr

    expected, _ = run()
    found, said = run("--tune-exchange", "tuned.toml")
    assert "paceline: the exchange is tuned after " in said, said
    tree = tomllib.loads((shared_folder / "tuned.toml").read_text())
    assert tree["made"]["hosts"] == len(layout.split(","))
    again, said = run("--tune-exchange", "tuned.toml")
    assert "the exchange uses the settings of " in said
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(again[name], one, rtol=1e-3, atol=1e-4)
    assert hosts.left_over(10) == []
