"""A run without communication: what its receives hold, and what is sent all the same."""

import ranks
import torch

from paceline.analyze.records.load_run import load_run
from paceline.record.ring.stack_sampler import LIBRARY_PREFIXES
from paceline.record.ring.states import State

SAVES = """
    import torch, torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.distributed_c10d import _world
    from paceline.record.experiments.switches import NoCommunicationGroup

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for group in list(_world.pg_map):
        group.inner = NoCommunicationGroup(group.inner)
        group._checks = None
    silent = torch.full((2,), float(rank))
    dist.all_reduce(silent)
    received = [torch.full((2,), torch.nan), torch.zeros(2, dtype=torch.uint8)]
    for one in received:
        dist.recv(one, 1 - rank)
    state = {f"own-{rank}": torch.full((3 + rank,), float(rank)), "step": torch.tensor(7)}
    dcp.async_save(state, checkpoint_id="saved").result()
    if rank == 0:
        found = dcp.FileSystemReader("saved").read_metadata()
        values = [one.tolist() for one in (silent, *received)]
        print(*values, sorted(found.state_dict_metadata))
"""


def test_asynchronous_checkpoint_without_communication_is_complete(tmp_path):
    script = ranks.write(tmp_path, SAVES)
    out = ranks.run(script, launcher=f"paceline --record {tmp_path}/record").stdout
    assert "[0.0, 0.0] [0.0, 0.0] [1, 1] ['own-0', 'own-1', 'step']" in out
    for record in load_run(tmp_path / "record").records:  # the call, and the wait for its end
        assert record.count(State.CHECKPOINT) == 2


HOROVOD = """
    from types import SimpleNamespace
    import torch
    import paceline.compat.horovod.torch as hvd
    from paceline.record.experiments.experiment import Experiment

    hvd.init()
    before = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="gradient")
    Experiment._replace_groups(SimpleNamespace(_results={"silent": 0}))
    if hvd.rank() == 0:  # it waits for nobody
        after = hvd.allreduce(torch.full((2,), 3.0), op=hvd.Sum, name="gradient")
        hvd.grouped_allreduce([torch.full((2,), 3.0)], name="other")
        print(before.tolist(), after.tolist(), hvd.allgather(torch.ones(1)).tolist())
    """


def test_collectives_of_horovod_are_switched_off(tmp_path):
    out = ranks.run(
        ranks.write(tmp_path, HOROVOD), launcher=f"paceline --record {tmp_path}/r"
    ).stdout
    assert "[2.0, 2.0] [3.0, 3.0] [1.0, 1.0]" in out


def test_installed_packages_are_libraries_wherever_they_are_found():
    assert torch.__file__.startswith(LIBRARY_PREFIXES)
