"""Reductions over shared memory: special values, and more ranks than a slot has lines."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import played
import pytest
import torch
import torch.distributed as dist
from memory_threads import reduced, scattered, together

from paceline.comm import backend
from paceline.comm.hosts.c_wire import encode_program
from paceline.comm.hosts.schedules import ALL_REDUCE
from paceline.comm.shared import memory
from paceline.comm.shared.collective_calls import REDUCTIONS
from paceline.comm.shared.open_group import slot_bytes
from paceline.comm.shared_memory_group import DTYPE_INDEX

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LONG = 20_000  # elements: more than every rank reduces as a whole, and more than fit a slot
KINDS = pytest.mark.parametrize("kind", ["c", "torch"])


@KINDS
@pytest.mark.parametrize("count", [2, LONG])
def test_float16_subnormals_are_summed_with_flush_denormal(kind, count):
    x = torch.tensor([2e-5, 6e-8], dtype=torch.float16).repeat(count // 2)

    def what(kernel):
        assert torch.set_flush_denormal(True)  # of this thread
        return [reduced(kernel, x, "sum"), reduced(kernel, x, "mean"), reduced(kernel, x, "max")]

    for total, mean, most in together(2, what, kind):
        assert torch.equal(total, 2 * x)
        assert torch.equal(mean, x)
        assert torch.equal(most, x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [2, LONG])
def test_flush_denormal_on_one_rank_gives_same_bits_on_all(dtype, count):
    x = torch.full((count,), torch.finfo(dtype).smallest_normal / 4, dtype=dtype)

    def what(kernel):
        torch.set_flush_denormal(kernel.rank == 0)
        total = reduced(kernel, x, "sum")
        flushed = float(torch.tensor([1e-40]) * 1) == 0
        return total, flushed

    (one, flushed), (other, not_flushed) = together(2, what)
    assert torch.equal(one, other)
    assert torch.equal(other, 2 * x)
    assert (flushed, not_flushed) == (True, False), "the mode of the thread has changed"


def test_flush_denormal_on_one_host_gives_same_bits_on_all():
    x = np.full(2, 1e-40, np.float32)

    def what(me, wire):
        torch.set_flush_denormal(me == 0)  # of this thread
        steps = encode_program(ALL_REDUCE["doubling"](x.nbytes, me, 2))
        found[me] = x.copy()
        wire.run(steps, found[me].ctypes.data, played.call("all-reduce", nbytes=x.nbytes), 20)

    found, hosts = {}, played.Together(2)
    hosts.do(what)
    hosts.close()
    expected = np.frombuffer(x.tobytes(), np.uint32) * 2  # the bits of a subnormal count units
    for one in found.values():
        assert (np.frombuffer(one.tobytes(), np.uint32) == expected).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sockets", ["", "0101", "0001", "011"])
def test_mean_of_large_and_small_values(dtype, sockets):
    """Four values of 40,000 have a sum that float16 can't hold, and a mean that it can."""
    size = len(sockets) or 4
    x = torch.tensor([40_000, -60_000, 6e-8, 1], dtype=dtype).repeat(LONG // 4)
    for found in together(size, lambda kernel: reduced(kernel, x, "mean"), sockets=sockets):
        torch.testing.assert_close(found, x, atol=0, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sockets", ["", "001"])
def test_mean_over_hosts_is_divided_by_all_ranks(sockets, dtype):
    """The kernel reduces the ranks of one of two hosts, in parts; the mean is that of both."""
    x = torch.full((LONG,), 40_000, dtype=dtype)
    part = x.nbytes // 3 // 64 * 64 + 64

    def what(kernel):
        found = x.clone()
        kind, how = DTYPE_INDEX[dtype], REDUCTIONS.index("mean")
        kernel.reduce_parts(found.data_ptr(), x.nbytes, part, kind, how, 6, 20)
        kernel.gather_parts(found.data_ptr(), x.nbytes, part, 20)
        return found

    for found in together(3, what, sockets=sockets):
        torch.testing.assert_close(found, x / 2)


@KINDS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [9, LONG])
def test_minimum_and_maximum_keep_nan_of_any_rank(kind, dtype, count):
    def what(kernel):
        x = torch.ones(count, dtype=dtype)
        x[kernel.rank] = float("nan")
        return reduced(kernel, x, "min"), reduced(kernel, x, "max")

    for found in together(3, what, kind):
        for one in found:
            assert one[:3].isnan().all()
            assert (one[3:] == 1).all()


@pytest.mark.parametrize("how", ["min", "max"])
@pytest.mark.parametrize("name", ["ring", "direct", "doubling"])
def test_minimum_and_maximum_between_hosts_keep_nan(name, how):
    def what(host):
        x = torch.ones(300)
        x[host] = float("nan")
        return x.numpy()

    for found in played.reduced_vectors(name, [what(host) for host in range(3)], how):
        assert torch.from_numpy(found).isnan().nonzero().flatten().tolist() == [0, 1, 2]


@KINDS
@pytest.mark.parametrize("count", [0, 1, 3, pytest.param(1000, marks=pytest.mark.long)])
def test_reduce_scatter_with_many_ranks_for_a_slot(kind, count):
    """A rank's chunk is shorter than a cache line, or the slot fits fewer lines than ranks."""
    size, slot = 20, 1024
    each = [
        torch.arange(size * count, dtype=torch.float64).view(size, -1) + at for at in range(size)
    ]
    found = together(size, lambda kernel: scattered(kernel, each[kernel.rank], "sum"), kind, slot)
    for rank, one in enumerate(found):
        assert torch.equal(one, sum(x[rank] for x in each))


def test_reduction_in_parts_with_many_ranks_for_a_slot():
    size, slot, part = 20, 1024, 192
    x = torch.arange(size * part // 4 - 5, dtype=torch.float32)

    def what(kernel):
        found = x + kernel.rank
        kernel.reduce_parts(found.data_ptr(), x.nbytes, part, 0, 0, size, 20)
        kernel.gather_parts(found.data_ptr(), x.nbytes, part, 20)
        return found

    for found in together(size, what, slot=slot):
        assert torch.equal(found, size * x + sum(range(size)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", REDUCTIONS)
def test_kernels_in_c_and_torch_round_equally(dtype, how):
    """All values of 16 bits, with subnormals, infinities and NaN, and others of any size."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    order = torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))
    each = [bits.view(dtype), bits[order].view(dtype)]
    found = [together(2, lambda k: reduced(k, each[k.rank], how), kind) for kind in ("c", "torch")]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 2, 273, 274, 2048, 2049, 10_000])
def test_a_slot_fits_an_element_for_each_rank(size):
    assert slot_bytes(size) >= 8 * size


@KINDS
def test_no_elements_on_many_ranks(kind):
    empty = torch.empty(0)

    def what(kernel):
        kernel.all_gather(0, [0] * kernel.size, 0, 20)
        kernel.broadcast(0, 0, kernel.size - 1, 20)
        return reduced(kernel, empty, "sum"), reduced(kernel, torch.ones(1), "sum")

    for none, one in together(20, what, kind, 1024):
        assert (none.numel(), float(one)) == (0, 20)


@KINDS
@pytest.mark.parametrize("timeout", [timedelta.max.total_seconds(), float("inf"), 0.0])
def test_late_rank_within_unlimited_timeout(kind, timeout):
    def what(kernel):
        if kernel.rank:
            time.sleep(0.2)  # until rank 0 has looked at the time
        return float(reduced(kernel, torch.ones(1), "sum", timeout))

    assert together(2, what, kind) == [2, 2]


@pytest.mark.parametrize("timeout", [2**32 / 1000 + 0.05, 1e9], ids=["50 days", "30 years"])
def test_memory_is_shared_with_late_rank(timeout):
    """Python passes a socket's timeout on as 32 bits of milliseconds."""
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(memory.open_shared_memory, store, 0, 2, 4096, timeout)
        time.sleep(0.2)
        second = pool.submit(memory.open_shared_memory, store, 1, 2, 4096, timeout)
        for one in (first, second):
            os.close(one.result())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (timedelta(seconds=5), 5),
        (timedelta.max, backend.MAX_TIMEOUT.total_seconds()),
        (timedelta(0), backend.MAX_TIMEOUT.total_seconds()),  # no limit, as in gloo
    ],
)
def test_timeout_of_a_group(monkeypatch, given, expected):
    asked = []
    monkeypatch.setattr(backend, "open_kernel", lambda *args: asked.append(args[3]) or (None, "no"))
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    assert backend.over_memory(group, None, given) == (group, "no")
    assert asked == [expected]


def group_of_one(timeout):
    options = SimpleNamespace(
        store=dist.HashStore(),
        group_rank=0,
        group_size=1,
        group_id="alone",
        timeout=timeout,
        global_ranks_in_group=[0],
    )
    return backend.create(options, None)


@pytest.mark.parametrize(
    "gather",
    [
        lambda group, out, x: group.allgather([[out]], [x]),
        lambda group, out, x: group._allgather_base(out, x),
        lambda group, out, x: group.reduce_scatter([out], [[x]], dist.ReduceScatterOptions()),
        lambda group, out, x: group._reduce_scatter_base(out, x, dist.ReduceScatterOptions()),
    ],
)
def test_other_dtype_of_the_same_size_is_rejected(gather):
    """float32 would be read as int32, bit by bit."""
    group = group_of_one(timedelta(seconds=20))
    with pytest.raises(RuntimeError, match="type"):
        gather(group, torch.zeros(4, dtype=torch.int32), torch.ones(4))


def test_longest_timeout_of_python_is_accepted():
    """The longest timedelta overflows 64-bit nanoseconds."""
    group = group_of_one(timedelta.max)
    x = torch.ones(2)
    group.allreduce([x]).wait()
    group.allreduce([x], dist.AllreduceOptions()).wait()
    assert x.tolist() == [1, 1]
