"""Layouts on one GPU: NCCL with one rank, FSDP2 on a mesh of one, checkpoints of another device."""

import copy

import pytest
import torch
import torch.distributed as dist
from on_gpu import CUDA, Net
from torch.distributed.fsdp import MixedPrecisionPolicy

from paceline.comm import backend
from paceline.cost.layout import Layout
from paceline.parallel.clipping import clip_gradients
from paceline.parallel.deferred import deferred, is_deferred
from paceline.parallel.materialization import Materialization
from paceline.parallel.mesh import Mesh
from paceline.parallel.offload import offload_states
from paceline.parallel.replicated.data_parallel import data_parallel
from paceline.parallel.sharded import fully_sharded
from paceline.parallel.sharded.deferred_shards import plan_shards
from paceline.parallel.sharded.fully_sharded import shard_model
from paceline.parallel.sharded.layouts import parse_request
from paceline.parallel.strategy.distributed_model import DistributedModel
from paceline.parallel.strategy.layout_arguments import with_arguments
from paceline.record.ring.recorder import Recorder
from paceline.record.ring.states import LAUNCH_STATES, Op, State

pytestmark = pytest.mark.gpu
LAYOUTS = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def recorder():
    """A recorder, and the group "paceline" of one rank: NCCL for tensors of the GPU."""
    made = Recorder(0, 1)
    backend.record(made)
    if CUDA:
        torch.cuda.set_device(0)
    dist.init_process_group(backend.NAME, store=dist.HashStore(), rank=0, world_size=1)
    yield made
    fully_sharded._meshes.clear()
    dist.destroy_process_group()
    backend.record(None)


def events_of(recorder):
    from paceline.analyze.records.read_record import parse_record

    return parse_record(recorder.snapshot()).events


COLLECTIVES = {
    "all_reduce": (lambda x: dist.all_reduce(x), Op.ALL_REDUCE),
    "all_reduce max": (lambda x: dist.all_reduce(x, op=dist.ReduceOp.MAX), Op.ALL_REDUCE),
    "broadcast": (lambda x: dist.broadcast(x, 0), Op.BROADCAST),
    "reduce": (lambda x: dist.reduce(x, 0), Op.REDUCE),
    "all_gather": (lambda x: dist.all_gather([torch.empty_like(x)], x), Op.ALL_GATHER),
    "all_gather_into": (
        lambda x: dist.all_gather_into_tensor(torch.empty_like(x), x),
        Op.ALL_GATHER,
    ),
    "reduce_scatter": (
        lambda x: dist.reduce_scatter_tensor(torch.empty_like(x), x.clone()),
        Op.REDUCE_SCATTER,
    ),
    "all_to_all": (
        lambda x: dist.all_to_all_single(torch.empty_like(x), x.clone()),
        Op.ALL_TO_ALL,
    ),
    "barrier": (lambda x: dist.barrier(), Op.BARRIER),
    "object": (lambda x: dist.all_gather_object([None], {"a": 1}), Op.ALL_GATHER),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_on_the_device_are_recorded(recorder, device, name, is_async):
    call, op = COLLECTIVES[name]
    if is_async and name not in ("all_reduce", "broadcast", "all_gather_into"):
        pytest.skip("waits itself")
    x = torch.arange(1000.0, device=device)
    before = len(events_of(recorder))
    if is_async:
        works = {
            "all_reduce": lambda: dist.all_reduce(x, async_op=True),
            "broadcast": lambda: dist.broadcast(x, 0, async_op=True),
            "all_gather_into": lambda: dist.all_gather_into_tensor(x.clone(), x, async_op=True),
        }
        works[name]().wait()
    else:
        call(x)
    assert torch.equal(x.cpu(), torch.arange(1000.0))
    new = events_of(recorder)[before:]
    launched = new[[State(s) in (*LAUNCH_STATES, State.CALL) for s in new["state"]]]
    assert int(op) in launched["op"].tolist()


def test_group_has_nccl_for_gpus_and_gloo_for_cpus(recorder, device):
    group = dist.group.WORLD
    assert dist.get_backend(group)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [1.0] * 3
    y = torch.ones(3, device=device)
    dist.all_reduce(y)
    assert y.tolist() == [1.0] * 3


def test_new_groups_and_timeouts(recorder, device):
    from datetime import timedelta

    group = dist.new_group([0], timeout=timedelta(seconds=30))
    x = torch.ones(3, device=device)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    assert x.tolist() == [1.0] * 3


def data(count=6, batch=16):
    g = torch.Generator().manual_seed(2)
    return torch.randn(count, batch, 32, generator=g, dtype=torch.float64)


def stepped(model, optimizer, device, clip=None, autocast=False, accumulate=1):
    """Train some steps; return losses and the whole parameters by name."""
    losses = []
    for number, x in enumerate(data().to(device)):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(x.to(next(model.parameters()).dtype)).double().square().mean()
        loss.backward()
        losses.append(loss.item())
        if (number + 1) % accumulate == 0:
            if clip:
                clip_gradients(list(model.parameters()), clip)
            optimizer.step()
            optimizer.zero_grad()
    whole = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
        for n, p in model.named_parameters()
    }
    return losses, whole


def request_of(layout, device, offload=None, **options):
    known = with_arguments(Layout.parse(layout), "job", offload, None)
    return parse_request(known, None, device.type, options)


def sharded(model, optimizer, device, request, plan=None):
    inner = DistributedModel(model)
    return shard_model(inner, optimizer, device, request, Mesh(0, 1), plan).module


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


@pytest.mark.parametrize("offload", [None, "optimizer", "parameters"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_model_trains_as_the_plain_one(recorder, device, layout, offload):
    if offload == "parameters" and not CUDA:
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    plain = Net(64, 3, dropout=0.0).double()
    model = copy.deepcopy(plain)
    expected = stepped(plain.to(device), adam(plain), device)
    optimizer = adam(model)
    request = request_of(layout, device, offload)
    model = sharded(model.to(device), optimizer, device, request)
    if offload == "optimizer":
        offload_states(optimizer, device)
    found = stepped(model, optimizer, device)
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-8, atol=1e-10)
    if offload:
        states = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in states]
        assert states
        assert all(t.device.type == "cpu" for t in local)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_sharded_clipping_and_fused_optimizers(recorder, device, layout, fused, clip):
    torch.manual_seed(0)
    plain = Net(64, 2, dropout=0.0).double()
    model = copy.deepcopy(plain)
    expected = stepped(plain.to(device), adam(plain, fused=fused), device, clip)
    optimizer = adam(model, fused=fused)
    request = request_of(layout, device)
    model = sharded(model.to(device), optimizer, device, request)
    found = stepped(model, optimizer, device, clip)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_model_in_bfloat16(recorder, device, layout):
    torch.manual_seed(0)
    model = Net(64, 2, dropout=0.0)
    optimizer = adam(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    request = request_of(layout, device, mp_policy=policy)
    model = sharded(model.to(device), optimizer, device, request)
    losses, whole = stepped(model, optimizer, device)
    assert losses[-1] < losses[0]
    assert all(value.dtype == torch.float32 for value in whole.values())


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_deferred_model_is_sharded_on_the_device(recorder, device, layout):
    torch.manual_seed(7)
    expected = Net(64, 2).state_dict()
    torch.manual_seed(7)
    with deferred():
        model = Net(64, 2)
    assert is_deferred(model)
    optimizer = adam(model)
    request = request_of(layout, device)
    plan = plan_shards(model)
    from paceline.parallel.placement import place_model

    if plan is None:
        Materialization(model).run()
    model = sharded(place_model(model, device, None), optimizer, device, request, plan)
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert whole.device.type == device.type
        assert torch.equal(whole.cpu(), expected[name])


@pytest.mark.parametrize("name", ["plain", "gradient views", "static graph", "unused"])
def test_data_parallel_model_trains_as_the_plain_one(recorder, device, name):
    options = {
        "plain": {},
        "gradient views": {"gradient_as_bucket_view": True},
        "static graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
    }[name]
    torch.manual_seed(0)
    plain = Net(64, 2, dropout=0.0).double()
    model = copy.deepcopy(plain).to(device)
    expected = stepped(plain.to(device), adam(plain), device)
    replica = data_parallel(model, device, **options)
    found = stepped(replica, adam(model), device)
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
