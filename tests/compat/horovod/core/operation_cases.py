"""What Horovod documents about its operations: each function is one case, run on every rank.

``run_cases`` runs all cases in one job of several ranks; test_operations.py reads the results.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import pytest
import torch

import paceline.compat.horovod.torch as hvd
from paceline.compat.horovod.common.exceptions import HorovodInternalError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def own(rank, shape=(3, 2), dtype=torch.float32):
    """Return the tensor of a rank, which all ranks can compute."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * 7 + 5 * rank) % 23).reshape(shape).to(dtype)


def every(size, *args, **options):
    return torch.stack([own(rank, *args, **options) for rank in range(size)])


def equal(found, expected, **options):
    torch.testing.assert_close(found, expected, **options)


def raises(kind, text, function, *args, **options):
    """Check that a call raises an exception with this text in its message; return the message."""
    with pytest.raises(kind) as caught:
        function(*args, **options)
    assert text in str(caught.value), str(caught.value)
    return str(caught.value)


# Allreduce


@case
def allreduce_average_is_the_default(rank, size):
    x = own(rank)
    equal(hvd.allreduce(x, name="average"), every(size).mean(0))
    equal(x, own(rank), rtol=0, atol=0)  # the input is not modified


@case
def allreduce_sum_of_all_dtypes(rank, size):
    for dtype in (*FLOATS, *INTEGERS):
        found = hvd.allreduce(own(rank, dtype=dtype), op=hvd.Sum)
        assert found.dtype == dtype
        equal(found, every(size).sum(0).to(dtype), rtol=0, atol=0)


@case
def allreduce_min_max_product(rank, size):
    equal(hvd.allreduce(own(rank), op=hvd.Min), every(size).amin(0))
    equal(hvd.allreduce(own(rank), op=hvd.Max), every(size).amax(0))
    equal(hvd.allreduce(own(rank), op=hvd.Product), every(size).prod(0))


@case
def allreduce_average_of_integers(rank, size):
    for dtype in INTEGERS:
        x = torch.full((4,), 6 + rank, dtype=dtype)
        total = sum(6 + one for one in range(size))
        assert hvd.allreduce(x, op=hvd.Average).tolist() == [total // size] * 4
        negative = torch.full((4,), -3, dtype=torch.int32)
        assert hvd.allreduce(negative, op=hvd.Average).tolist() == [-3] * 4


@case
def allreduce_average_argument_is_deprecated(rank, size):
    import warnings

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        equal(hvd.allreduce(own(rank), average=False), every(size).sum(0))
        equal(hvd.allreduce(own(rank), average=True), every(size).mean(0))
    assert all("average" in str(one.message) for one in found)
    assert len(found) == 2
    raises(ValueError, "supersedes", hvd.allreduce, own(rank), average=True, op=hvd.Sum)


@case
def allreduce_in_place(rank, size):
    x = own(rank)
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    equal(x, every(size).sum(0))


@case
def allreduce_async_and_synchronize(rank, size):
    x = own(rank)
    handle = hvd.allreduce_async(x, name="async")
    equal(hvd.synchronize(handle), every(size).mean(0))
    assert hvd.synchronize(handle) is None  # waited for before
    handle = hvd.allreduce_async_(x, op=hvd.Sum)
    assert hvd.synchronize(handle) is x
    equal(x, every(size).sum(0))


@case
def poll_becomes_true_without_synchronize(rank, size):
    handle = hvd.allreduce_async(own(rank), op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    equal(hvd.synchronize(handle), every(size).sum(0))
    assert hvd.poll(handle)


@case
def allreduce_prescale_and_postscale(rank, size):
    for dtype in FLOATS:
        found = hvd.allreduce(
            own(rank, dtype=dtype), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
        )
        equal(found, (2 * every(size).sum(0)).to(dtype))
    found = hvd.allreduce(own(rank), prescale_factor=0.5)
    equal(found, 0.5 * every(size).mean(0))


@case
def allreduce_scales_integers_in_double_precision(rank, size):
    x = own(rank, dtype=torch.int64)
    scaled = (every(size).double() * 0.3).long().sum(0)
    equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.3), scaled, rtol=0, atol=0)
    assert hvd.allreduce(torch.tensor([10]), op=hvd.Sum, postscale_factor=0.25).item() == (
        size * 10 // 4
    )


@case
def allreduce_fp16_compression(rank, size):
    found = hvd.allreduce(own(rank), compression=hvd.Compression.fp16)
    assert found.dtype == torch.float32
    equal(found, every(size).mean(0), rtol=1e-3, atol=1e-3)


@case
def allreduce_of_scalar_empty_and_large(rank, size):
    equal(hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum), torch.tensor(size * (size - 1) / 2))
    assert hvd.allreduce(torch.empty(0, 3), op=hvd.Sum).shape == (0, 3)
    large = torch.full((300_001,), rank + 1.0)
    equal(hvd.allreduce(large, op=hvd.Sum), torch.full((300_001,), size * (size + 1) / 2))


@case
def allreduce_of_different_memory_formats(rank, size):
    """Large tensors are exchanged where they are, and gloo does so in the order of the memory."""
    shape = (64, 3, 40, 40)
    x = own(rank, shape)
    if rank == size - 1:
        x = x.to(memory_format=torch.channels_last)
    hvd.allreduce_(x, name="formats", op=hvd.Sum)
    equal(x, every(size, shape).sum(0))


@case
def allreduce_of_channels_last(rank, size):
    x = own(rank, (2, 3, 4, 4)).to(memory_format=torch.channels_last)
    if rank % 2:  # layouts may differ between ranks
        x = x.contiguous()
    equal(hvd.allreduce(x, op=hvd.Sum), every(size, (2, 3, 4, 4)).sum(0))
    hvd.allreduce_(x, op=hvd.Sum)
    equal(x, every(size, (2, 3, 4, 4)).sum(0))


@case
def mean_without_overflow(rank, size):
    x = torch.full((4, 2), 60_000.0, dtype=torch.float16)
    equal(hvd.allreduce(x), x)
    equal(hvd.reducescatter(x.clone(), op=hvd.Average), x[: 4 // size])
    equal(x, torch.full((4, 2), 60_000.0, dtype=torch.float16))


@case
def allreduce_gradient(rank, size):
    for op in (hvd.Average, hvd.Sum):
        x = own(rank).requires_grad_()
        hvd.allreduce(x, op=op).backward(torch.full((3, 2), rank + 1.0))
        total = size * (size + 1) / 2
        equal(x.grad, torch.full((3, 2), total / size if op == hvd.Average else total))


@case
def allreduce_gradient_of_prescale(rank, size):
    x = own(rank).requires_grad_()
    hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5).sum().backward()
    equal(x.grad, torch.full((3, 2), 0.5 * size))


@case
def allreduce_in_another_order_on_each_rank(rank, size):
    order = [(at * (2 * rank + 1)) % 16 for at in range(16)]
    for _ in range(3):
        handles = {at: hvd.allreduce_async(own(at), op=hvd.Sum, name=f"{at}") for at in order}
        for at, handle in handles.items():
            equal(hvd.synchronize(handle), size * own(at))


@case
def synchronize_in_another_order_on_each_rank(rank, size):
    handles = [hvd.allreduce_async(own(at), op=hvd.Sum, name=f"s{at}") for at in range(8)]
    for at in range(8) if rank % 2 else reversed(range(8)):
        equal(hvd.synchronize(handles[at]), size * own(at))


@case
def allreduce_from_several_threads(rank, size):
    from concurrent.futures import ThreadPoolExecutor

    def work(thread):
        return [hvd.allreduce(own(rank), op=hvd.Sum, name=f"{thread}.{at}") for at in range(10)]

    with ThreadPoolExecutor(3) as pool:
        for results in pool.map(work, range(3)):
            for found in results:
                equal(found, every(size).sum(0))


@case
def allreduce_of_many_tensors_is_fused(rank, size):
    shapes = [(at % 7 + 1, 3) for at in range(120)]
    for _ in range(2):
        tensors = [
            own(rank, shape, torch.float64 if at % 3 else torch.float32)
            for at, shape in enumerate(shapes)
        ]
        handles = [hvd.allreduce_async_(one, name=f"f{at}") for at, one in enumerate(tensors)]
        for handle, one, shape in zip(handles, tensors, shapes, strict=True):
            hvd.synchronize(handle)
            equal(one, every(size, shape, one.dtype).mean(0))


@case
def allreduce_with_a_name_in_another_shape_later(rank, size):
    for length in (3, 3, 5, 3):
        equal(
            hvd.allreduce(torch.ones(length), op=hvd.Sum, name="changes"),
            torch.full((length,), float(size)),
        )


@case
def allreduce_rejects_what_it_can_not_reduce(rank, size):
    raises(ValueError, "BoolTensor", hvd.allreduce, torch.ones(2, dtype=torch.bool))
    raises(ValueError, "contiguous", hvd.allreduce, torch.ones(4, 4).t())
    raises(ValueError, "layout", hvd.allreduce, torch.ones(2, 2).to_sparse())
    raises(ValueError, "not a tensor", hvd.allreduce_async, [1, 2])
    raises(ValueError, "not a reduction", hvd.allreduce, torch.ones(2), op=9)


@case
def reductions_have_horovods_numbers(rank, size):
    names = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
    assert [int(one) for one in names] == [0, 1, 2, 3, 4, 5]
    equal(hvd.allreduce(own(rank), op=1), every(size).sum(0))


# Grouped


@case
def grouped_allreduce_of_mixed_dtypes(rank, size):
    tensors = [own(rank), own(rank, (5,), torch.int32), own(rank, (400, 300))]
    found = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
    assert isinstance(found, list)
    for one, given in zip(found, tensors, strict=True):
        equal(one, every(size, given.shape, given.dtype).sum(0).to(given.dtype))
    equal(tensors[0], own(rank))


@case
def grouped_allreduce_in_place_and_async(rank, size):
    tensors = [own(rank), own(rank, (5,))]
    hvd.grouped_allreduce_(tensors)
    equal(tensors[1], every(size, (5,)).mean(0))
    found = hvd.synchronize(hvd.grouped_allreduce_async([own(rank)], prescale_factor=2.0))
    equal(found[0], 2 * every(size).mean(0))
    tensors = [own(rank), own(rank, (5,))]
    result = hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Max))
    assert result[0] is tensors[0]
    equal(tensors[0], every(size).amax(0))


@case
def grouped_allreduce_gradient_and_compression(rank, size):
    tensors = [own(rank).requires_grad_(), own(rank, (5,)).requires_grad_()]
    found = hvd.grouped_allreduce(tensors, op=hvd.Sum, compression=hvd.Compression.fp16)
    (found[0].sum() + 2 * found[1].sum()).backward()
    equal(tensors[0].grad, torch.full((3, 2), float(size)))
    equal(tensors[1].grad, torch.full((5,), 2.0 * size))


@case
def grouped_operations_reject_an_empty_list(rank, size):
    raises(ValueError, "empty", hvd.grouped_allreduce, [])
    raises(ValueError, "empty", hvd.grouped_allgather, [])
    raises(ValueError, "empty", hvd.grouped_reducescatter, [])


# Allgather


@case
def allgather_of_equal_sizes_and_all_dtypes(rank, size):
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        found = hvd.allgather(own(rank, dtype=dtype), name=f"gather {dtype}")
        assert found.dtype == dtype
        equal(found, every(size, dtype=dtype).reshape(-1, 2))


@case
def allgather_of_uneven_sizes(rank, size):
    rows = [(3 * one + 2) % 5 for one in range(size)]
    found = hvd.allgather(own(rank, (rows[rank], 4)))
    equal(found, torch.cat([own(one, (rows[one], 4)) for one in range(size)]))


@case
def allgather_where_a_rank_has_nothing(rank, size):
    found = hvd.allgather(torch.full((rank, 2), float(rank)))
    assert found[:, 0].tolist() == [one for one in range(size) for _ in range(one)]
    assert hvd.allgather(torch.empty(0, 2)).shape == (0, 2)


@case
def allgather_sizes_may_change_under_the_same_name(rank, size):
    for rows in (2, 3, 1):
        assert hvd.allgather(torch.ones(rows + rank, 2), name="resized").shape[0] == sum(
            rows + one for one in range(size)
        )


@case
def allgather_async(rank, size):
    handle = hvd.allgather_async(torch.tensor([rank]))
    assert hvd.synchronize(handle).tolist() == list(range(size))


@case
def allgather_gradient_is_the_average_of_the_ranks(rank, size):
    rows = [one + 1 for one in range(size)]
    x = torch.ones(rows[rank], 2, requires_grad=True)
    weights = torch.cat([torch.full((rows[one], 2), one + 1.0) for one in range(size)])
    hvd.allgather(x).backward(weights * (rank + 1))
    equal(x.grad, torch.full((rows[rank], 2), (rank + 1.0) * (size + 1) / 2))


@case
def grouped_allgather_of_uneven_tensors(rank, size):
    found = hvd.grouped_allgather([torch.full((rank + 1,), rank), torch.ones(2, 3)], name="pair")
    assert found[0].tolist() == [one for one in range(size) for _ in range(one + 1)]
    assert found[1].shape == (2 * size, 3)
    found = hvd.synchronize(hvd.grouped_allgather_async([torch.tensor([rank])]))
    assert found[0].tolist() == list(range(size))


@case
def grouped_allgather_gradient(rank, size):
    x, y = torch.ones(rank + 1, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    a, b = hvd.grouped_allgather([x, y])
    (a.sum() + 3 * b.sum()).backward()
    equal(x.grad, torch.ones(rank + 1))
    equal(y.grad, torch.full((2, 3), 3.0))


# Broadcast


@case
def broadcast_from_each_rank_and_of_all_dtypes(rank, size):
    for root in range(size):
        for dtype in (*FLOATS, *INTEGERS, torch.bool):
            x = own(rank, dtype=dtype)
            equal(hvd.broadcast(x, root), own(root, dtype=dtype))
            equal(x, own(rank, dtype=dtype))


@case
def broadcast_in_place_and_async(rank, size):
    x = own(rank)
    assert hvd.broadcast_(x, size - 1, name="inplace") is x
    equal(x, own(size - 1))
    equal(hvd.synchronize(hvd.broadcast_async(own(rank), 0)), own(0))
    x = own(rank)
    assert hvd.synchronize(hvd.broadcast_async_(x, 0)) is x
    equal(x, own(0))


@case
def broadcast_of_a_parameter_in_place(rank, size):
    layer = torch.nn.Linear(2, 3)
    weight = torch.nn.Parameter(own(rank))
    hvd.broadcast_(weight, 0)
    equal(weight.detach(), own(0))
    assert layer.weight.requires_grad


@case
def broadcast_gradient_belongs_to_the_root(rank, size):
    x = own(rank).requires_grad_()
    hvd.broadcast(x, size - 1).backward(torch.full((3, 2), rank + 1.0))
    equal(x.grad, torch.full((3, 2), (size + 1) / 2 if rank == size - 1 else 0.0))


@case
def broadcast_rejects_a_root_outside(rank, size):
    raises(ValueError, "invalid root rank", hvd.broadcast, torch.ones(2), size)


# Alltoall


@case
def alltoall_without_splits_returns_a_tensor(rank, size):
    x = torch.arange(2 * size) + 100 * rank
    found = hvd.alltoall(x)
    assert found.tolist() == [100 * one + 2 * rank + at for one in range(size) for at in (0, 1)]


@case
def alltoall_with_splits_also_returns_received_splits(rank, size):
    splits = [rank + to for to in range(size)]
    x = torch.cat([torch.full((count, 3), 10 * rank + to) for to, count in enumerate(splits)])
    for given in (splits, torch.tensor(splits, dtype=torch.int32)):
        found, received = hvd.alltoall(x, splits=given, name="splits")
        assert received.dtype == torch.int32
        assert received.tolist() == [one + rank for one in range(size)]
        assert found[:, 0].tolist() == [
            10 * one + rank for one in range(size) for _ in range(one + rank)
        ]


@case
def alltoall_async_always_returns_received_splits(rank, size):
    found, received = hvd.synchronize(hvd.alltoall_async(torch.arange(size)))
    assert found.tolist() == [rank] * size
    assert received.tolist() == [1] * size


@case
def alltoall_of_nothing_and_of_one_row(rank, size):
    found, received = hvd.alltoall(torch.empty(0, 2), splits=[0] * size)
    assert found.shape == (0, 2)
    assert received.tolist() == [0] * size
    splits = [1] + [0] * (size - 1)
    found, _ = hvd.alltoall(torch.tensor([float(rank)]), splits=splits)
    assert found.tolist() == (list(map(float, range(size))) if rank == 0 else [])


@case
def alltoall_gradient(rank, size):
    splits = [to + 1 for to in range(size)]
    x = torch.ones(sum(splits), 2, requires_grad=True)
    found, _ = hvd.alltoall(x, splits=splits)
    (found * (rank + 1)).sum().backward()
    expected = torch.cat([torch.full((count, 2), to + 1.0) for to, count in enumerate(splits)])
    equal(x.grad, expected)
    x = torch.ones(size + 1, requires_grad=True)  # the last row is sent to no rank
    hvd.alltoall(x, splits=[1] * size)[0].sum().backward()
    assert x.grad.tolist() == [1.0] * size + [0.0]


@case
def alltoall_rejects_wrong_splits(rank, size):
    x = torch.ones(size + 1, 2)
    raises(ValueError, "does not equal number", hvd.alltoall, x, splits=[1] * (size + 1))
    raises(ValueError, "greater than the first", hvd.alltoall, x, splits=[9] * size)
    raises(ValueError, "32-bit", hvd.alltoall, x, splits=torch.ones(size, dtype=torch.int64))
    raises(ValueError, "greater than the first", hvd.alltoall, x, splits=[-1] * size)
    raises(ValueError, "no dimensions", hvd.alltoall, torch.tensor(1.0))
    if size > 1:
        raises(ValueError, "not an even multiple", hvd.alltoall, x)


# Reducescatter


@case
def reducescatter_of_even_and_uneven_rows(rank, size):
    for rows in (2 * size, 2 * size + 1, size - 1):
        counts = [rows // size + (one < rows % size) for one in range(size)]
        parts = every(size, (rows, 3)).sum(0).split(counts)
        found = hvd.reducescatter(own(rank, (rows, 3)), op=hvd.Sum, name=f"rs{rows}")
        equal(found, parts[rank])


@case
def reducescatter_average_is_the_default(rank, size):
    shape = (size, 2)
    equal(hvd.reducescatter(own(rank, shape)), every(size, shape).mean(0)[rank : rank + 1])
    x = own(rank, shape, torch.int32)
    found = hvd.reducescatter(x)
    expected = every(size, shape).sum(0).long() // size
    equal(found.long(), expected[rank : rank + 1])


@case
def reducescatter_min_max_product_and_dtypes(rank, size):
    shape = (size, 2)
    for op, how in ((hvd.Min, torch.amin), (hvd.Max, torch.amax), (hvd.Product, torch.prod)):
        found = hvd.reducescatter(own(rank, shape), op=op)
        equal(found, how(every(size, shape), 0)[rank : rank + 1])
    for dtype in (*FLOATS, *INTEGERS):
        found = hvd.reducescatter(own(rank, shape, dtype), op=hvd.Sum)
        equal(found, every(size, shape).sum(0).to(dtype)[rank : rank + 1])


@case
def reducescatter_scales_and_compresses(rank, size):
    shape = (size, 2)
    found = hvd.reducescatter(
        own(rank, shape), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0
    )
    equal(found, 1.5 * every(size, shape).sum(0)[rank : rank + 1])
    found = hvd.reducescatter(own(rank, shape), compression=hvd.Compression.fp16)
    assert found.dtype == torch.float32


@case
def reducescatter_gradient(rank, size):
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(size))):
        x = own(rank, (size, 2)).requires_grad_()
        (hvd.reducescatter(x, op=op) * (rank + 1)).sum().backward()
        rows = torch.arange(1, size + 1, dtype=torch.float32).view(-1, 1).expand(size, 2)
        equal(x.grad, factor * rows)


@case
def reducescatter_rejects_adasum(rank, size):
    raises(ValueError, "Adasum", hvd.reducescatter, torch.ones(size), op=hvd.Adasum)


@case
def grouped_reducescatter(rank, size):
    tensors = [own(rank, (size, 2)), own(rank, (size + 1,), torch.float64)]
    found = hvd.grouped_reducescatter(tensors, op=hvd.Sum, name="grouped")
    equal(found[0], every(size, (size, 2)).sum(0)[rank : rank + 1])
    whole = every(size, (size + 1,), torch.float64).sum(0)
    equal(found[1], whole[:2] if rank == 0 else whole[rank + 1 : rank + 2])
    found = hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(size)], op=hvd.Sum))
    assert found[0].tolist() == [size]


@case
def grouped_reducescatter_gradient(rank, size):
    x = torch.ones(size, requires_grad=True)
    hvd.grouped_reducescatter([x], op=hvd.Sum)[0].sum().backward()
    assert x.grad.tolist() == [size] * size


# Sparse


@case
def sparse_allreduce(rank, size):
    indices = torch.tensor([[rank, 0], [1, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (size + 1, 3))
    dense = torch.zeros(size + 1, 3)
    for one in range(size):
        dense[one, 1] += 1
        dense[0, 2] += 2
    for op, expected in ((hvd.Sum, dense), (hvd.Average, dense / size)):
        handle = hvd.sparse_allreduce_async(sparse, name="sparse", op=op)
        equal(hvd.synchronize(handle).to_dense(), expected)
    handle = hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Sum)
    equal(handle().to_dense(), dense)
    raises(ValueError, "sparse", hvd.sparse_allreduce_async, sparse, "no", hvd.Max)


# Adasum


@case
def adasum_follows_its_formula(rank, size):
    def combine(a, b):
        product = float(a @ b)
        return (1 - product / (2 * float(a @ a))) * a + (1 - product / (2 * float(b @ b))) * b

    vectors = [own(one, (50,), torch.float64) + 1 for one in range(size)]
    found = hvd.allreduce(vectors[rank].clone(), op=hvd.Adasum, name="adasum")
    while len(vectors) > 1:
        vectors = [combine(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    equal(found, vectors[0])


@case
def adasum_of_equal_and_of_orthogonal_gradients(rank, size):
    equal(hvd.allreduce(torch.ones(4), op=hvd.Adasum), torch.ones(4))  # as an average
    x = torch.zeros(size)
    x[rank] = 1
    equal(hvd.allreduce(x, op=hvd.Adasum), torch.ones(size))  # as a sum
    equal(hvd.allreduce(torch.zeros(3), op=hvd.Adasum), torch.zeros(3))


@case
def adasum_is_applied_to_each_fused_tensor(rank, size):
    tensors = [torch.full((3,), 1.0 + at) for at in range(4)]
    handles = [hvd.allreduce_async(x, op=hvd.Adasum, name=f"a{at}") for at, x in enumerate(tensors)]
    for handle, x in zip(handles, tensors, strict=True):
        equal(hvd.synchronize(handle), x)


# Join and barrier


@case
def join_contributes_zeros(rank, size):
    for step in range(rank + 1):  # rank r has r + 1 batches
        active = size - step
        x = torch.full((3,), 2.0)
        equal(hvd.allreduce(x, op=hvd.Sum, name="joined"), torch.full((3,), 2.0 * active))
        equal(hvd.allreduce(x, name="joined too"), torch.full((3,), 2.0 * active / size))
        large = torch.ones(100_000)
        equal(hvd.allreduce(large, op=hvd.Sum), torch.full((100_000,), float(active)))
    last = hvd.join()
    assert last == size - 1, last
    equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="joined"), torch.full((2,), float(size)))


@case
def join_twice(rank, size):
    for first in (0, size - 1):
        if rank != first:
            hvd.allreduce(torch.ones(2), name="once more")
        assert hvd.join() in range(size)


@case
def join_after_unfinished_operations(rank, size):
    handle = hvd.allreduce_async(own(rank), op=hvd.Sum, name="before join")
    hvd.join()
    equal(hvd.synchronize(handle), every(size).sum(0))


@case
def join_refuses_what_zeros_would_falsify(rank, size):
    if size == 1:
        return
    if rank:
        for what in (
            lambda: hvd.allreduce(own(0), op=hvd.Max, name="max"),
            lambda: hvd.allgather(own(0), name="gathered"),
            lambda: hvd.broadcast(own(0), 1, name="broadcast"),
            lambda: hvd.reducescatter(own(0), name="scattered"),
            lambda: hvd.alltoall(torch.ones(size), name="all to all"),
            hvd.barrier,
        ):
            raises(HorovodInternalError, "not supported with Join", what)
    hvd.join()


@case
def barrier_waits_for_all_ranks(rank, size):
    mark = Path(sys.argv[1], "rank 0 has come")
    if rank == 0:
        mark.touch()
    hvd.barrier()
    assert mark.exists()


# Ranks that disagree


@case
def mismatched_shapes_say_who_has_what(rank, size):
    if size == 1:
        return
    x = torch.ones(3 if rank == 0 else 4)
    text = raises(HorovodInternalError, "mismatched shapes", hvd.allreduce, x, name="shape")
    assert "rank 0 has [3]" in text
    assert "[4]" in text
    hvd.allreduce(torch.ones(3), name="shape")  # the world goes on


@case
def mismatched_dtypes(rank, size):
    if size > 1:
        x = torch.ones(3, dtype=torch.int32 if rank == 0 else torch.float32)
        text = raises(HorovodInternalError, "mismatched dtypes", hvd.allreduce, x, name="dtype")
        assert "rank 0 has int32" in text


@case
def mismatched_reductions(rank, size):
    if size > 1:
        op = hvd.Max if rank == 0 else hvd.Sum
        text = raises(HorovodInternalError, "reductions", hvd.allreduce, own(0), name="op", op=op)
        assert "rank 0 has Max" in text


@case
def mismatched_roots(rank, size):
    if size > 1:
        root = 0 if rank == 0 else 1
        text = raises(HorovodInternalError, "root ranks", hvd.broadcast, own(0), root, name="root")
        assert "rank 0 has 0" in text


@case
def mismatched_factors(rank, size):
    if size > 1:
        factor = 2.0 if rank == 0 else 1.0
        raises(
            HorovodInternalError,
            "scale factors",
            hvd.allreduce,
            own(0),
            name="factor",
            prescale_factor=factor,
        )


@case
def mismatched_shapes_of_a_gather(rank, size):
    if size > 1:
        x = torch.ones(2, 3 if rank == 0 else 4)
        text = raises(HorovodInternalError, "shapes", hvd.allgather, x, name="wide")
        assert "except in the first dimension" in text


@case
def mismatched_numbers_of_grouped_tensors(rank, size):
    if size > 1:
        tensors = [torch.ones(2)] * (1 if rank == 0 else 2)
        raises(HorovodInternalError, "numbers of tensors", hvd.grouped_allreduce, tensors, name="g")


@case
def mismatch_of_a_cached_operation_on_one_rank(rank, size):
    for _ in range(3):
        hvd.allreduce(torch.ones(4), name="cached")
    if size > 1:
        x = torch.ones(4 if rank == 0 else 5)
        raises(HorovodInternalError, "mismatched shapes", hvd.allreduce, x, name="cached")
    equal(hvd.allreduce(torch.ones(4), name="cached"), torch.ones(4))


@case
def gather_of_scalars_is_an_error(rank, size):
    if size > 1:
        raises(HorovodInternalError, "no dimensions", hvd.allgather, torch.tensor(1.0))
        raises(HorovodInternalError, "no dimensions", hvd.reducescatter, torch.tensor(1.0))


@case
def values_that_are_no_tensors_are_errors(rank, size):
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        raises(ValueError, "is not a tensor", call, [1, 2])
    raises(ValueError, "is not a tensor", hvd.broadcast, "text", 0)


@case
def duplicate_name_in_flight(rank, size):
    if size == 1:
        return
    if rank:
        hvd.barrier()
    handle = hvd.allreduce_async(own(rank), name="duplicate")
    if rank == 0:  # the others have not submitted it
        raises(ValueError, "same name", hvd.allreduce_async, own(rank), name="duplicate")
        hvd.barrier()
    hvd.synchronize(handle)
    hvd.allreduce(own(rank), name="duplicate")


# Ranks


@case
def ranks_and_nodes(rank, size):
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1)),
    )
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)  # on one node
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    hvd.init()  # a second call does nothing
    assert hvd.size() == size


@case
def features(rank, size):
    assert not hvd.mpi_built()
    assert not hvd.mpi_enabled()
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not any((hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()))
    assert hvd.nccl_built() == 0 or torch.cuda.is_available()
    raises(ValueError, "MPI is not enabled", hvd.mpi_threads_supported)


def run_cases(cases, folder):
    """Run all cases on this rank, and write what failed."""
    hvd.init()
    rank, size, found = hvd.rank(), hvd.size(), {}
    for name, function in cases.items():
        try:
            function(rank, size)
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_cases(CASES, sys.argv[1])
