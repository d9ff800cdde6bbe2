"""Every collective of torch.distributed is recorded at one place and gives its usual result."""

import datetime
import gc
import json
import threading
import weakref
from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist

from paceline.analyze.records.read_record import parse_record
from paceline.record.hooks import collectives, hook_failures
from paceline.record.hooks.collectives import RecordedGroup
from paceline.record.ring.recorder import Recorder
from paceline.record.ring.states import State

SCRIPT = """
    import json, os, sys, torch, torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    import paceline
    from paceline.analyze.records.read_record import parse_record
    from paceline.record.ring.states import Op, State

    world = paceline.init(progress=False)
    rank, size = world.rank, world.size
    recorder = world._recorder
    ones = torch.ones(4)

    def result_of(name):
        x = ones.clone()
        if name == "all_reduce":
            dist.all_reduce(x)
        elif name == "all_reduce_async":
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            assert work.is_completed()
        elif name == "broadcast":
            x *= rank + 5
            dist.broadcast(x, 1)
        elif name == "all_gather":
            parts = [torch.zeros(4) for _ in range(size)]
            dist.all_gather(parts, x * rank)
            x = torch.stack(parts)
        elif name == "all_gather_into_tensor":
            whole = torch.zeros(4 * size)
            dist.all_gather_into_tensor(whole, x * rank)
            x = whole
        elif name == "reduce_scatter_tensor":
            x = torch.zeros(2)
            dist.reduce_scatter_tensor(x, torch.arange(2.0 * size))
        elif name == "reduce":
            dist.reduce(x, 0)
            x = x if rank == 0 else ones * size
        elif name == "gather":
            parts = [torch.zeros(4) for _ in range(size)] if rank == 1 else None
            dist.gather(x, parts, dst=1)
        elif name == "scatter":
            parts = [ones * r for r in range(size)] if rank == 0 else None
            dist.scatter(x, parts, src=0)
            x = x - rank
        elif name == "all_to_all_single":
            x = torch.zeros(size)
            dist.all_to_all_single(x, torch.full((size,), float(rank)))
        elif name == "barrier":
            dist.barrier()
        elif name == "send_recv":
            if rank == 0:
                dist.send(x * 3, 1)
            elif rank == 1:
                dist.recv(x, 0)
            x = ones
        elif name == "functional_all_reduce":
            x = functional.all_reduce(x, "sum", dist.group.WORLD) + 0
        elif name == "subgroup":
            dist.all_reduce(x, group=subgroup)
        elif name == "objects":
            objects = [None] * size
            dist.all_gather_object(objects, {"rank": rank})
            x = torch.tensor([o["rank"] for o in objects])
        return x.tolist()

    subgroup = dist.new_group(list(range(size)))
    results, ops = {}, {}
    for name in sys.argv[2].split(","):
        before = len(parse_record(recorder.snapshot()).events)
        results[name] = result_of(name)
        new = parse_record(recorder.snapshot()).events[before:]
        flights = new[new["state"] == State.COLLECTIVE]
        ops[name] = [[Op(int(e["op"])).name, int(e["amount"])] for e in flights]
        assert len(new[new["state"] == State.BLOCKED]) >= len(flights), name
    if rank == 0:
        json.dump([results, ops], open(sys.argv[1], "w"))
    """

NAMES = {
    "all_reduce": [2.0] * 4,
    "all_reduce_async": [2.0] * 4,
    "broadcast": [6.0] * 4,
    "all_gather": [[0.0] * 4, [1.0] * 4],
    "all_gather_into_tensor": [0.0] * 4 + [1.0] * 4,
    "reduce_scatter_tensor": [0.0, 2.0],
    "reduce": [2.0] * 4,
    "gather": [1.0] * 4,
    "scatter": [0.0] * 4,
    "all_to_all_single": [0.0, 1.0],
    "barrier": [1.0] * 4,
    "send_recv": [1.0] * 4,
    "functional_all_reduce": [2.0] * 4,
    "subgroup": [2.0] * 4,
    "objects": [0, 1],
}


def test_every_collective_is_recorded_with_correct_result(tmp_path):
    out = tmp_path / "out.json"
    ranks.run(ranks.write(tmp_path, SCRIPT), out, ",".join(NAMES))
    results, ops = json.loads(out.read_text())
    assert results == NAMES
    assert ops["all_reduce"] == ops["subgroup"] == [["ALL_REDUCE", 16]]
    assert ops["all_gather_into_tensor"] == [["ALL_GATHER", 32]]  # bytes of the output
    assert ops["reduce_scatter_tensor"] == [["REDUCE_SCATTER", 16]]  # bytes of the input
    assert ops["broadcast"] == [["BROADCAST", 16]]
    assert ops["gather"] == [["GATHER", 32]]
    assert ops["barrier"] == [["BARRIER", 0]]
    assert ops["send_recv"] == [["SEND", 16]]
    assert ops["functional_all_reduce"] == [["ALL_REDUCE", 16]]
    assert len(ops["objects"]) == 2  # the sizes, then the objects


HOOK = """
    import json, sys, torch, torch.distributed as dist
    import paceline
    from paceline.analyze.records.read_record import parse_record
    from paceline.record.ring.states import Op, State
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    world = paceline.init(progress=False)
    torch.manual_seed(0)
    model = world.distribute(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]),
                             bucket_cap_mb=0.25)
    if sys.argv[2] == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    for _ in range(3):
        before = len(parse_record(world._recorder.snapshot()).events)
        model(torch.ones(4, 256)).sum().backward()
    new = parse_record(world._recorder.snapshot()).events[before:]
    reduced = new[(new["state"] == State.COLLECTIVE) & (new["op"] == Op.ALL_REDUCE)]
    if world.rank == 0:
        json.dump([len(reduced), int(reduced["amount"].sum())], open(sys.argv[1], "w"))
    """


def test_ddp_buckets_are_recorded_with_and_without_comm_hook(tmp_path):
    script = ranks.write(tmp_path, HOOK)
    parameters = 6 * (256 * 256 + 256)
    ranks.run(script, tmp_path / "plain.json", "plain")
    buckets, amount = json.loads((tmp_path / "plain.json").read_text())
    assert buckets >= 3
    assert amount == parameters * 4
    ranks.run(script, tmp_path / "hook.json", "hook")
    assert json.loads((tmp_path / "hook.json").read_text()) == [buckets, parameters * 2]


@pytest.fixture
def group(tmp_path):
    """Return a recorded group of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    inner = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, datetime.timedelta(seconds=30))
    inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return RecordedGroup(inner, "0", Recorder(0, 1, folder=tmp_path))


def states(group):
    """Return the states of all events, without waits for a core of a busy machine."""
    found = parse_record(group._recorder.snapshot()).states.tolist()
    return [state for state in found if state != State.STARVED]


@pytest.mark.parametrize("waits", [True, False])
def test_last_collective_does_not_keep_its_tensor_alive(group, waits):
    tensor = torch.ones(1 << 20)
    work = group.allreduce([tensor])
    if waits:
        work.wait()
    del work
    alive = weakref.ref(tensor)
    del tensor
    ranks.wait_until(lambda: gc.collect() is not None and alive() is None)
    group.allreduce([torch.ones(1)]).wait()
    assert states(group).count(State.COLLECTIVE) == 2


def test_collective_of_another_thread_is_not_of_the_training(group):
    group.allreduce([torch.ones(1)]).wait()

    def save():
        group.allreduce([torch.ones(1)]).wait()

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    training, background = states(group)[:2], states(group)[2:]
    assert set(training) == {State.BLOCKED, State.COLLECTIVE}
    assert set(background) == {State.BACKGROUND_BLOCKED, State.BACKGROUND_COLLECTIVE}


def test_failure_of_the_recorder_does_not_fail_a_collective(group, monkeypatch):
    said = []
    monkeypatch.setattr(hook_failures, "notify", said.append)
    monkeypatch.setattr(group, "note_launch", lambda *_: {}["broken"])
    tensor = torch.ones(2)
    for _ in range(3):
        assert group.allreduce([tensor]).wait()
    assert len(said) == 1
    assert "hook of the collectives failed" in said[0]
    hook_failures.failed_hooks.clear()


class Check:
    """A check that has not ended, and then finds that the ranks call different collectives."""

    done, cost_ns = False, 0

    def begin(self, *_):
        return self

    def wait(self, _):
        self.finish()

    def finish(self):
        raise ValueError("ranks disagree about collective 1")


@pytest.mark.parametrize("failure", ["earlier", "before the call", "after the call"])
def test_mismatch_is_reported_if_the_hook_of_collectives_fails(group, monkeypatch, failure):
    """The result's Work does not finish the check then, so the call does."""
    monkeypatch.setattr(hook_failures, "notify", lambda _: None)
    monkeypatch.setattr(hook_failures, "failed_hooks", {})
    monkeypatch.setattr(collectives, "failed_hooks", hook_failures.failed_hooks)
    group._checks = Check()
    if failure == "earlier":
        hook_failures.report_failure(collectives.COLLECTIVES_HOOK, ValueError())
    elif failure == "before the call":
        monkeypatch.setattr(collectives, "sum_bytes", lambda _: {}["broken"])
    else:
        monkeypatch.setattr(group, "note_launch", lambda *_: {}["broken"])
    with pytest.raises(ValueError, match="ranks disagree about collective 1") as error:
        group.allreduce([torch.ones(2)])
    assert error.value.__context__ is None


def test_collective_of_another_thread_is_kept_while_finished_ones_are_dropped(group):
    """The other thread launches while this one goes through the unfinished collectives."""
    work, launched = group.allreduce([torch.ones(1)]), []

    def done():
        if not launched:
            launched.append(None)
            launched[0] = group.allreduce([torch.ones(1)])
        return True

    work.done = done
    group.forget_finished()
    (kept,) = group._unfinished
    assert kept[1]() is launched[0]
    launched[0].wait()


def test_collective_in_a_captured_graph_is_not_recorded(monkeypatch):
    """Its Work would be asked whether it has ended, which ends the capture with an error."""
    recorder = Recorder(0, 1)
    inner = dist.ProcessGroup(dist.HashStore(), 0, 1)
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=datetime.timedelta(seconds=30))
    inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group = RecordedGroup(inner, "captured", recorder)
    monkeypatch.setattr(collectives, "is_capturing", lambda: True)
    group.allreduce([torch.ones(4)]).wait()
    assert not group._unfinished
    monkeypatch.setattr(collectives, "is_capturing", lambda: False)
    group.allreduce([torch.ones(4)]).wait()
    events = parse_record(recorder.snapshot()).events
    assert set(events[events["group"] > 0]["seq"].tolist()) == {2}


@pytest.mark.parametrize("is_async", [False, True])
def test_blocking_collective_without_a_work_is_recorded(is_async):
    """NCCL returns none: the current stream waits, and the host goes on."""
    recorder = Recorder(0, 1)
    recorder.launched_collectives = []
    group = RecordedGroup(dist.ProcessGroup(dist.HashStore(), 0, 1), "of a GPU", recorder)
    group.inner = SimpleNamespace(allreduce=lambda *_: None)
    options = dist.AllreduceOptions()
    options.asyncOp = is_async  # then it is a part of a batch, which is recorded as a whole
    assert group.allreduce([torch.ones(4)], options) is None
    events = parse_record(recorder.snapshot()).events
    states = [] if is_async else [State.BLOCKED, State.COLLECTIVE]
    assert events[events["group"] > 0]["state"].tolist() == states
    assert [one["amount"] for one in recorder.launched_collectives] == [16] * (not is_async)
