"""Knobs are set in every rank of an unmodified script, and results stay the same."""

import json
import re
from pathlib import Path

import pytest
import ranks
import torch

from paceline.knobs.knob import Switch
from paceline.knobs.registry import KNOBS
from paceline.knobs.settings import Setting, write_settings
from paceline.predict.gains import GAINS

ALL = """
    import json, os, resource, sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(7)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 1))
    strides = []
    net[0].register_forward_pre_hook(lambda layer, args: strides.append(args[0].stride()))
    model = DistributedDataParallel(net, bucket_cap_mb=7, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(16, 3, 8, 8))
    loader, held_out = DataLoader(data, 4), DataLoader(data, 8)
    for epoch in range(2):
        for x, in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for x, in held_out:
                model(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(48 << 20, dtype=torch.uint8)
    told = {
        "workers": [loader.num_workers, held_out.num_workers],
        "ahead": loader.prefetch_factor, "live on": loader.persistent_workers,
        "bucket": model.bucket_bytes_cap, "views": model.gradient_as_bucket_view,
        "buffers": model.broadcast_buffers,
        "search": model.find_unused_parameters, "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before,
        "images": strides[0], "weight": net[0].weight.stride(),
    }
    if dist.get_rank() == 0:
        torch.save([told, net.state_dict()], sys.argv[1])
    dist.destroy_process_group()
    """
SET = {
    "loader-workers": 2, "prefetch": 3, "bucket-mb": 2, "gradient-views": True,
    "unused-search-off": True, "threads": 1, "own-binding-off": True, "keep-memory": True,
    "channels-last": True, "buffers-off": True,
}  # fmt: skip


def run(folder, script, name, knobs, *args, check=True, **options):
    """Run the script with these knobs and return its stderr."""
    settings = folder / f"{name}.toml"
    write_settings(settings, {knob: Setting(value) for knob, value in knobs.items()}, {})
    launcher = f"paceline --settings {settings}" if knobs else "paceline"
    path = ranks.write(folder, script)
    return ranks.run(path, name, *args, launcher=launcher, check=check, **options).stderr


def results(folder, script, name, knobs, *args):
    said = run(folder, script, name, knobs, *args)
    return *torch.load(folder / name, weights_only=False), said


def test_all_compatible_knobs_are_set_with_same_result(tmp_path):
    plain, expected, _ = results(tmp_path, ALL, "plain", {})
    assert (plain["workers"], plain["bucket"], plain["threads"]) == ([0, 0], 7 << 20, 7)
    assert plain["cores"] == 1
    assert plain["buffers"] is True
    assert plain["faults"] > 80_000
    found, same, said = results(tmp_path, ALL, "set", SET)
    assert found["workers"] == [2, 0]  # the loader of the validation is unchanged
    assert (found["ahead"], found["live on"]) == (3, True)
    assert (found["bucket"], found["views"], found["search"]) == (2 << 20, True, False)
    assert found["threads"] == 1
    assert found["buffers"] is False
    assert found["cores"] == torch.get_num_threads() or found["cores"] > 1
    assert found["faults"] < 30_000  # only from the first tensor
    assert found["images"][1] == found["weight"][1] == 1  # channels_last strides
    for name, tensor in expected.items():
        torch.testing.assert_close(same[name], tensor)
    for word in ("threads is set", "own-binding-off is set"):
        assert said.count(f"paceline: {word}, so the script's call") == 1


ACCUMULATES = """
    import sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    exchanged = []
    for backwards in map(int, sys.argv[2].split(",")):
        optimizer.zero_grad()
        for _ in range(backwards):
            loss = model(torch.randn(4, 8)).square().mean()
            exchanged.append(model.require_backward_grad_sync)
            loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save([exchanged, net.state_dict()], sys.argv[1])
    dist.destroy_process_group()
    """
LOCALLY = {"accumulate-locally": True}


def test_accumulated_gradients_are_synchronized_once(tmp_path):
    every, expected, _ = results(tmp_path, ACCUMULATES, "plain", {}, "3,3,3")
    assert every == [True] * 9
    last, same, said = results(tmp_path, ACCUMULATES, "local", LOCALLY, "3,3,3")
    assert last == [True, True, True, False, False, True, False, False, True]
    for name, tensor in expected.items():
        torch.testing.assert_close(same[name], tensor)
    assert "warning" not in said


def test_step_with_fewer_backwards_is_still_synchronized(tmp_path):
    _, expected, _ = results(tmp_path, ACCUMULATES, "plain", {}, "3,3,2,3")
    last, same, said = results(tmp_path, ACCUMULATES, "local", LOCALLY, "3,3,2,3")
    assert last == [True, True, True, False, False, True, False, False, True, True, True]
    for name, tensor in expected.items():
        torch.testing.assert_close(same[name], tensor)
    assert "accumulate-locally: a step has fewer backwards than the one before" in said


def test_script_with_own_no_sync_is_unchanged(tmp_path):
    own = ACCUMULATES.replace("for _ in range(backwards):", "for at in range(backwards):").replace(
        "            loss = model", "            model.require_backward_grad_sync = at == 2\n"
        "            loss = model",
    )  # fmt: skip
    last, _, said = results(tmp_path, own, "local", LOCALLY, "3,3")
    assert last == [False, False, True] * 2
    assert said.count("accumulate-locally has no effect: the script calls no_sync") == 1


@pytest.mark.parametrize("kind", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_compressed_gradients_differ_only_by_rounding(tmp_path, kind):
    _, expected, _ = results(tmp_path, ACCUMULATES, "plain", {}, "1,1,1")
    _, found, _ = results(tmp_path, ACCUMULATES, "short", {f"compress-{kind}": True}, "1,1,1")
    assert any(not torch.equal(found[name], tensor) for name, tensor in expected.items())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-2)


STREAM = """
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(8))

    loader = DataLoader(Stream(), 4)
    print(sum(len(x) for x in loader), loader.num_workers)
    """


def test_iterable_dataset_gets_no_loader_workers(tmp_path):
    settings = tmp_path / "s.toml"
    write_settings(settings, {"loader-workers": Setting(2)}, {})
    script = ranks.write(tmp_path, STREAM)
    done = ranks.run(script, ranks=1, launcher=f"paceline --settings {settings}")
    assert done.stdout.split() == ["8", "0"]
    assert "loader-workers has no effect: its dataset is an IterableDataset" in done.stderr


@pytest.mark.long
def test_slow_example_with_settings_has_same_loss(tmp_path):
    """Use the settings of docs/how-to/improve/slow-job.md."""
    script = Path(__file__).parents[2] / "examples" / "slow.py"
    settings = tmp_path / "fast.toml"
    knobs = {"loader-workers": 3, "threads": 1, "accumulate-locally": True}
    write_settings(settings, {knob: Setting(value) for knob, value in knobs.items()}, {})
    runs = [
        ranks.run(script, "--epochs", 2, launcher=launcher).stdout
        for launcher in ("paceline", f"paceline --settings {settings}")
    ]
    slow, fast = ([float(x) for x in re.findall(r"loss ([\d.]+)", said)] for said in runs)
    assert len(slow) == 2
    assert fast == pytest.approx(slow, rel=0.02)


def test_every_knob_has_prediction_and_edit_text():
    known = {name for name, knob in KNOBS.items() if knob.saves is not None}
    assert not known & GAINS.keys()
    unpredicted = set(KNOBS) - known - GAINS.keys()
    assert all(KNOBS[name].hook for name in unpredicted)  # an edit cannot be measured by --try
    for name, knob in KNOBS.items():
        assert knob.does, name
        assert knob.edit, name
        assert bool(knob.hook) == (knob.value is not None), name
        assert all(name in KNOBS[other].excludes for other in knob.excludes), name
        if knob.value is not None:
            assert ("{value}" in knob.edit) != isinstance(knob.value, Switch), name


def test_settings_environment_variable_is_json(tmp_path):
    script = ranks.write(tmp_path, "import os; print(os.environ['PACELINE_SETTINGS'])")
    settings = tmp_path / "s.toml"
    write_settings(settings, {"threads": Setting(1)}, {})
    done = ranks.run(script, ranks=1, launcher=f"paceline --settings {settings}")
    assert json.loads(done.stdout) == {"threads": 1}


OVER_GLOO = """
    import os
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print(*(os.environ[f"NCCL_{name}"] for name in ("ALGO", "PROTO", "MIN_NCHANNELS")))
    dist.new_group([0])
    dist.barrier()  # a rank that ends closes the connections of a slower one
    dist.destroy_process_group()
    """


def test_nccl_variables_are_set_and_reported_as_unused_with_gloo(tmp_path):
    settings, knobs = tmp_path / "s.toml", ("nccl-algorithm", "nccl-protocol", "nccl-channels")
    write_settings(settings, dict(zip(knobs, map(Setting, ("Tree", "LL", 8)), strict=True)), {})
    script = ranks.write(tmp_path, OVER_GLOO)
    done = ranks.run(script, launcher=f"paceline --settings {settings}")
    assert done.stdout.splitlines() == ["Tree LL 8"]  # output that all ranks print appears once
    for knob in knobs:
        told = f"paceline: {knob} has no effect: the script does not use NCCL"
        assert done.stderr.count(told) == 1
