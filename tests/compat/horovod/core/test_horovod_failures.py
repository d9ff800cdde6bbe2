"""Ranks that die, leave or wait for what other ranks never submit."""

import time

import pytest
import ranks

import paceline.compat.horovod.torch as hvd
from paceline.compat.horovod.common.exceptions import HorovodInternalError

BEGIN = """
    import os, signal, sys, time
    import torch
    import paceline.compat.horovod.torch as hvd
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    def attempt(what):
        start = time.monotonic()
        try:
            what()
        except Exception as error:
            late = "late" if time.monotonic() - start > 5 else "soon"
            print(f"rank {rank} {late} {type(error).__name__}: {error}", flush=True)
    """


def run(folder, body, size=2, **options):
    script = ranks.write(folder, BEGIN + body)
    result = ranks.run(script, ranks=size, check=False, timeout=40, **options)
    return result, sorted(ranks.untagged(result.stdout)), result.stderr


def test_rank_that_dies_fails_the_operation_by_name(tmp_path):
    _, lines, _ = run(
        tmp_path,
        """
    x = torch.ones(3)
    hvd.allreduce(x, name="x")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    attempt(lambda: hvd.allreduce(x, name="x"))
    attempt(lambda: hvd.allreduce(x, name="y"))
    """,
    )
    gone = "Horovod's operation 'allreduce.x' can't continue: rank 1 has died"
    assert lines == [f"rank 0 soon HorovodInternalError: {gone}"]


def test_rank_that_leaves_without_join(tmp_path):
    """By hvd.shutdown() in the first part, by its end in the second."""
    result, lines, _ = run(
        tmp_path,
        """
    x = torch.ones(3)
    if rank == 1:
        hvd.shutdown()
        assert not hvd.is_initialized()
    else:
        attempt(lambda: hvd.allreduce(x))
        attempt(lambda: hvd.allreduce(x))
        hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum) == 2  # works again
    if rank == 0:
        attempt(lambda: hvd.allreduce(x, name="last"))
    """,
    )
    left = "Horovod has been shut down: rank 1 has called hvd.shutdown() or ended. HINT: give"
    assert result.returncode == 0
    assert [line for line in lines if left in line and "HorovodShutdownError" in line] == lines
    assert lines


def test_exit_with_an_unfinished_operation_does_not_hang(tmp_path):
    start = time.monotonic()
    result, _, _ = run(tmp_path, 'hvd.allreduce_async(torch.ones(3), name=f"{rank}")')
    assert result.returncode == 0
    assert time.monotonic() - start < 30


def test_stalled_operations_are_reported_with_names_and_ranks(tmp_path):
    result, _, stderr = run(
        tmp_path,
        """
    if rank != 1:
        handle = hvd.allreduce_async(torch.ones(3), name="grad")
    else:
        handle = hvd.broadcast_async(torch.ones(3), 0, name="grad")
    while not os.path.exists("seen"):
        if rank == 0 and time.monotonic() - hvd_start > 4:
            open("seen", "w").close()
        time.sleep(0.05)
    handle = hvd.broadcast_async(torch.ones(3), 0, name="grad") if rank != 1 else (
        hvd.allreduce_async(torch.ones(3), name="grad"))
    hvd.barrier()
    """.replace("hvd_start", "start").replace(
            "    if rank != 1:", "    start = time.monotonic()\n    if rank != 1:", 1
        ),
        size=3,
        HOROVOD_STALL_CHECK_TIME_SECONDS="1",
    )
    assert result.returncode == 0
    text = "stalled for more than 1 s: submitted 'allreduce.grad' by ranks 0, 2, not by rank 1 "
    assert stderr.count(text + "(rank 1 waits for 'broadcast.grad'). HINT: ") == 1


@pytest.mark.parametrize("exchange", ["paceline", "gloo"])
def test_stall_shutdown_time_fails_the_operation(tmp_path, exchange):
    """gloo can't interrupt a collective, in which this rank's thread remains."""
    start = time.monotonic()
    result, lines, _ = run(
        tmp_path,
        """
    hvd.barrier()
    if rank == 0:
        attempt(lambda: hvd.allreduce(torch.ones(3), name="x"))
        open("done", "w").close()
    while not os.path.exists("done"):
        time.sleep(0.05)
    """,
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1",
        PACELINE_EXCHANGE=exchange,
    )
    assert result.returncode == 0
    assert time.monotonic() - start < 25  # a rank that waits until a timeout is ended by the test
    assert len(lines) == 1
    assert lines[0].startswith(
        "rank 0 soon HorovodInternalError: stalled for more than 1 s: submitted 'allreduce.x' by "
        "rank 0, not by rank 1. HINT: "
    )


def test_operations_with_a_stall_shutdown_time(tmp_path):
    """The background thread exchanges: for several threads, waits at once, joins."""
    result, _, stderr = run(
        tmp_path,
        """
    handles = [hvd.allreduce_async(torch.ones(9), name=f"{i}", op=hvd.Sum) for i in range(5)]
    for i in range(200):
        assert hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum).tolist() == [2] * 3
    assert all(hvd.synchronize(one).tolist() == [2] * 9 for one in handles)
    if rank == 0:
        hvd.allreduce(torch.ones(3), name="x")
    assert hvd.join() >= 0
    """,
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="20",
    )
    assert result.returncode == 0, stderr


def test_shutdown_frees_the_process_groups(tmp_path):
    result, _, stderr = run(
        tmp_path,
        """
    import threading

    def used():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    found = []
    for turn in range(4):
        hvd.init(process_sets=[hvd.ProcessSet([0])])
        assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, name="x") == 2
        hvd.shutdown()
        found.append(used())
    assert max(found[1:]) <= found[0], found
    """,
    )
    assert result.returncode == 0, stderr


def test_forked_process_can_not_call_collectives(tmp_path):
    _, lines, _ = run(
        tmp_path,
        """
    hvd.barrier()
    if os.fork() == 0:
        attempt(lambda: hvd.allreduce(torch.ones(1)))
        os._exit(0)
    os.wait()
    hvd.barrier()
    """,
    )
    assert len(lines) == 2
    assert all("was forked from a rank" in line for line in lines)


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_process_group_of_the_script_is_used(tmp_path, backend):
    script = ranks.write(
        tmp_path,
        f"""
        import torch, torch.distributed as dist, paceline
        dist.init_process_group("{backend}")
        import paceline.compat.horovod.torch as hvd
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (dist.get_rank(), 2)
        x = torch.ones(3)
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="x")
        dist.all_reduce(x)  # the groups do not disturb each other
        assert hvd.synchronize(handle).tolist() == x.tolist() == [2] * 3
        hvd.shutdown()
        dist.all_reduce(x)
        dist.destroy_process_group()
        """,
    )
    assert ranks.run(script).returncode == 0


@pytest.mark.long
def test_torchrun_finds_the_world(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import torch
        import paceline.compat.horovod.torch as hvd
        hvd.init()
        print(hvd.rank(), hvd.size(), hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item())
        """,
    )
    result = ranks.run(script, launcher="torchrun")
    assert sorted(result.stdout.splitlines()) == ["0 2 2.0", "1 2 2.0"]


def test_use_before_init():
    import torch

    for function in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_size):
        with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
            function()
    for call in (lambda: hvd.allreduce(torch.ones(1)), hvd.barrier, hvd.join):
        with pytest.raises(HorovodInternalError, match="has not been initialized"):
            call()
    assert not hvd.is_initialized()
    assert hvd.global_process_set.size() in (None, 0)
    hvd.shutdown()  # does nothing
