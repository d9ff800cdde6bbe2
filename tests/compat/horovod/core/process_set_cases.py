"""What Horovod documents about process sets: cases for 4 ranks, see operation_cases.py."""

import sys

import torch
from operation_cases import equal, every, own, raises, run_cases

import paceline.compat.horovod.torch as hvd
from paceline.compat.horovod.common import process_sets as horovod_process_sets
from paceline.compat.horovod.common.exceptions import HorovodInternalError

EVEN, ODD, THREE = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1, 3]), hvd.ProcessSet([0, 1, 3])
ALONE = hvd.ProcessSet([2])
SETS = [EVEN, ODD, THREE, ALONE]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def own_set(rank):
    return EVEN if rank % 2 == 0 else ODD


def of_members(members, *args):
    return torch.stack([own(one, *args) for one in members])


@case
def static_process_sets_are_registered(rank, size):
    assert [one.process_set_id for one in SETS] == [1, 2, 3, 4]
    assert EVEN.ranks == [0, 2]
    assert (EVEN.size(), THREE.size(), ALONE.size()) == (2, 3, 1)
    assert [one.included() for one in SETS] == [rank % 2 == 0, rank % 2 == 1, rank != 2, rank == 2]
    assert own_set(rank).rank() == rank // 2
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.ranks == [0, 1, 2, 3]
    assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (4, rank)


@case
def rank_in_a_set_that_does_not_contain_it(rank, size):
    other = own_set(rank + 1)
    raises(ValueError, f"rank {rank} is not in process set", other.rank)


@case
def allreduce_in_disjoint_sets_with_the_same_name(rank, size):
    mine = own_set(rank)
    for op, how in ((hvd.Average, torch.mean), (hvd.Sum, torch.sum)):
        found = hvd.allreduce(own(rank), name="same", op=op, process_set=mine)
        equal(found, how(of_members(mine.ranks), 0))


@case
def allreduce_in_overlapping_uneven_sets(rank, size):
    mine = own_set(rank)
    handles = {}
    if rank != 2:
        handles["three"] = hvd.allreduce_async(own(rank), op=hvd.Sum, process_set=THREE)
    handles["mine"] = hvd.allreduce_async(own(rank), op=hvd.Sum, process_set=mine)
    handles["all"] = hvd.allreduce_async(own(rank), op=hvd.Sum)
    equal(hvd.synchronize(handles["all"]), every(size).sum(0))
    equal(hvd.synchronize(handles["mine"]), of_members(mine.ranks).sum(0))
    if rank != 2:
        equal(hvd.synchronize(handles["three"]), of_members([0, 1, 3]).sum(0))
    else:
        equal(hvd.allreduce(own(rank), op=hvd.Sum, process_set=ALONE), own(rank))


@case
def unnamed_operations_of_a_set_do_not_disturb_others(rank, size):
    for _ in range(rank):
        if rank == 2:
            hvd.allreduce(torch.ones(1), process_set=ALONE)
    equal(hvd.allreduce(own(rank), op=hvd.Sum), every(size).sum(0))


@case
def allgather_in_a_set(rank, size):
    mine = own_set(rank)
    found = hvd.allgather(torch.full((rank + 1,), rank), process_set=mine)
    assert found.tolist() == [one for one in mine.ranks for _ in range(one + 1)]
    found = hvd.grouped_allgather([torch.tensor([rank])], process_set=mine)
    assert found[0].tolist() == mine.ranks


@case
def broadcast_in_a_set_has_a_global_root(rank, size):
    mine = own_set(rank)
    root = mine.ranks[1]
    equal(hvd.broadcast(own(rank), root, process_set=mine), own(root))
    other = own_set(rank + 1).ranks[0]
    raises(ValueError, "invalid root rank", hvd.broadcast, own(0), other, process_set=mine)


@case
def alltoall_in_a_set(rank, size):
    if rank == 2:
        return
    index = THREE.rank()
    found, received = hvd.alltoall(torch.arange(3) + 10 * rank, splits=[1] * 3, process_set=THREE)
    assert found.tolist() == [index, 10 + index, 30 + index]
    assert received.tolist() == [1, 1, 1]
    raises(ValueError, "number of workers", hvd.alltoall, torch.ones(4), [1] * 4, None, THREE)


@case
def reducescatter_in_a_set(rank, size):
    if rank == 2:
        return
    found = hvd.reducescatter(own(rank, (4, 2)), op=hvd.Sum, process_set=THREE)
    whole = of_members([0, 1, 3], (4, 2)).sum(0)
    equal(found, whole.split([2, 1, 1])[THREE.rank()])


@case
def gradients_in_a_set(rank, size):
    mine = own_set(rank)
    x = own(rank).requires_grad_()
    hvd.allreduce(x, op=hvd.Sum, process_set=mine).sum().backward()
    equal(x.grad, torch.full((3, 2), 2.0))
    x = torch.ones(rank + 1, requires_grad=True)
    hvd.allgather(x, process_set=mine).sum().backward()
    equal(x.grad, torch.ones(rank + 1))
    x = torch.ones(2, requires_grad=True)
    hvd.broadcast(x, mine.ranks[0], process_set=mine).sum().backward()
    assert x.grad.tolist() == [1.0 if rank == mine.ranks[0] else 0.0] * 2


@case
def sparse_allreduce_in_a_set(rank, size):
    mine = own_set(rank)
    sparse = torch.sparse_coo_tensor([[rank]], [4.0], (4,))
    found = hvd.synchronize(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average, mine))
    assert found.to_dense().tolist() == [2.0 if one in mine.ranks else 0.0 for one in range(4)]


@case
def barrier_in_a_set(rank, size):
    hvd.barrier(process_set=own_set(rank))


@case
def collective_of_a_set_that_the_rank_is_not_in(rank, size):
    other = own_set(rank + 1)
    text = raises(ValueError, "is not in process set", hvd.allreduce, own(0), process_set=other)
    assert f"(ranks {other.ranks})" in text


@case
def mismatch_in_a_set_names_global_ranks(rank, size):
    mine = own_set(rank)
    x = torch.ones(2 + rank)
    text = raises(HorovodInternalError, "shapes", hvd.allreduce, x, name="m", process_set=mine)
    assert f"rank {mine.ranks[1]} has [{2 + mine.ranks[1]}]" in text


@case
def adasum_in_a_set_is_refused(rank, size):
    raises(
        NotImplementedError,
        "non-global",
        hvd.allreduce,
        own(0),
        op=hvd.Adasum,
        process_set=own_set(rank),
    )


@case
def process_sets_are_added_and_removed(rank, size):
    added = hvd.add_process_set([1, 2, 3])
    assert added.ranks == [1, 2, 3]
    assert added.process_set_id == 5
    assert horovod_process_sets.process_set_by_id(5) is added
    assert len(horovod_process_sets.process_sets()) == 6
    if rank:
        equal(hvd.allreduce(own(rank), op=hvd.Sum, process_set=added), of_members([1, 2, 3]).sum(0))
    assert hvd.remove_process_set(added)
    assert added.process_set_id is None
    assert added.ranks is None
    assert added.included() is None
    raises(ValueError, "is not registered", hvd.allreduce, own(0), process_set=added)
    raises(ValueError, "no process set 5", horovod_process_sets.process_set_by_id, 5)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert not hvd.remove_process_set(added)
    again = hvd.add_process_set(hvd.ProcessSet([3, 1, 2]))  # the ranks are free again
    assert again.process_set_id == 6
    assert hvd.remove_process_set(again)


@case
def process_sets_that_can_not_be_added(rank, size):
    raises(ValueError, "process set 1 has the same ranks", hvd.add_process_set, [0, 2])
    raises(ValueError, "global_process_set", hvd.add_process_set, [0, 1, 2, 3])
    raises(ValueError, "world of 4 ranks", hvd.add_process_set, [0, 4])
    raises(ValueError, "different ranks", hvd.add_process_set, [0, 0])
    raises(ValueError, "different ranks", hvd.add_process_set, [])
    raises(ValueError, "list of process ranks", hvd.ProcessSet, ["0"])
    raises(ValueError, "not a list of ranks", hvd.ProcessSet, 3)


@case
def ranks_that_add_different_sets(rank, size):
    ranks = [0, 3] if rank == 1 else [0, 1]
    text = raises(HorovodInternalError, "arguments", hvd.add_process_set, ranks)
    assert "rank 1 has ranks [0, 3]" in text


@case
def join_is_of_all_ranks(rank, size):
    for _ in range(rank):
        hvd.allreduce(torch.ones(1), name="j")
        hvd.allreduce(torch.ones(1))
    assert hvd.join() == 3
    equal(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([4.0]))


if __name__ == "__main__":
    hvd.init(process_sets=SETS)
    run_cases(CASES, sys.argv[1])
