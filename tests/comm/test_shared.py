"""Collectives over shared memory: results equal to PyTorch's for all shapes, dtypes and sizes."""

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist
from collectives import ANY, FAILS, SAME, TRAINS

import paceline
from paceline.comm import backend
from paceline.comm.group_device import exchangeable
from paceline.comm.shared_memory_group import SharedMemoryGroup

KERNEL = Path(paceline.__file__).parent / "comm" / "shared"


@pytest.mark.parametrize(
    "count", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (5, 8))]
)
def test_all_collectives_match_expected_results(tmp_path, count):
    done = ranks.run(ranks.write(tmp_path, ANY), count, 60, ranks=count)
    assert done.stdout.count("all as expected") == count


WITHOUT_C = """
    from pathlib import Path
    from paceline.comm.shared import c_kernel
    c_kernel.LIBRARY_PATH = Path("/nowhere")
    """


def test_fallback_to_torch_without_c_kernel_is_reported(tmp_path):
    start = "    import paceline\n"
    script = ranks.write(tmp_path, ANY.replace(start, start + WITHOUT_C.lstrip("\n"), 1))
    done = ranks.run(script, 1, 40, ranks=3)
    assert done.stdout.count("all as expected") == 3
    assert done.stderr.count("because the kernel in C was not built. HINT: install a C") == 1


NO_ROOM = """
    import resource
    import torch, torch.distributed as dist
    import paceline

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    dist.init_process_group("paceline")
    x = torch.ones(8)
    dist.all_reduce(x)
    print(dist.get_rank(), type(dist.group.WORLD).__name__, float(x.sum()), flush=True)
    dist.destroy_process_group()
    """


def test_fallback_to_gloo_without_shared_memory_is_reported(tmp_path):
    done = ranks.run(ranks.write(tmp_path, NO_ROOM))
    assert {f"{rank} ProcessGroup 16.0" for rank in (0, 1)} <= ranks.untagged(done.stdout)
    said = "paceline: ranks exchange through gloo: rank 0: "
    assert done.stderr.count(said) == 1
    assert "File too large" in done.stderr


THE_REST = """
    import torch, torch.distributed as dist
    import paceline

    dist.init_process_group("paceline")
    rank, size = dist.get_rank(), dist.get_world_size()
    for i in range(3000):  # each frees the tensors of the one before, in a thread of gloo's
        x = torch.full((2,), float(rank))
        out = torch.empty(2)
        dist.all_to_all_single(out, x)
        dist.reduce(out, 0)
    found = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.ones(1), found)
    print(rank, "all came back", flush=True)
    dist.destroy_process_group()
    """


GROUPS = """
    import os, time
    import torch, torch.distributed as dist
    import paceline

    dist.init_process_group("paceline")
    for _ in range(3):
        group = dist.new_group()
        x = torch.ones(100_000)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.destroy_process_group(group)
        del group
    mapped = open("/proc/self/maps").read().count("memfd:paceline")
    files = sum("memfd:paceline" in os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))
    rank = dist.get_rank()
    for turn in range(3):  # the store still has addresses of the groups before
        dist.destroy_process_group()
        dist.init_process_group("paceline")
        x = torch.full((1,), float(turn) if rank == 0 else -1.0)
        if rank == 0:
            dist.send(x, 1)
        else:
            assert (dist.recv(x), x.item()) == (0, turn)
        group = dist.new_group([0, 1] if turn else [0])  # all of them have the same name
        if rank == 0 or turn:
            dist.barrier(group)
        del group
    x = torch.tensor([os.getpid()])
    if rank == 0:  # more messages than a socket has room for, at the end of this rank
        for _ in range(2000):
            dist.send(x, 1)
    else:
        dist.recv(x, 0)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and os.path.exists(f"/proc/{x.item()}"):
            time.sleep(0.05)
        for _ in range(1999):
            dist.recv(x, 0)
    print(rank, f"has {mapped} mapped and {files} open", flush=True)
    dist.destroy_process_group()
    """


OTHER_USER = """
    import os
    rank, own = int(os.environ["RANK"]), os.getuid()
    os.getuid = lambda: own + rank // 2
    import paceline
    paceline.init()
    """


def test_ranks_of_a_node_as_different_users_are_an_error(tmp_path):
    done = ranks.run(ranks.write(tmp_path, OTHER_USER), check=False, ranks=3)
    assert done.returncode == 1
    said = "the ranks of a node run as different users: rank 0 as user "
    assert said in done.stderr
    assert f"rank 2 as user {os.getuid() + 1}. HINT: " in done.stderr


def test_a_process_group_is_freed_and_created_again(tmp_path):
    done = ranks.run(ranks.write(tmp_path, GROUPS), timeout=30)
    assert ranks.untagged(done.stdout) == {f"{rank} has 1 mapped and 1 open" for rank in (0, 1)}


def test_collectives_delegated_to_gloo(tmp_path):
    done = ranks.run(ranks.write(tmp_path, THE_REST), timeout=60)
    assert done.stdout.count("all came back") == 2


def test_all_reduce_is_bitwise_reproducible(tmp_path):
    script = ranks.write(tmp_path, SAME)
    for name in ("one", "two"):
        ranks.run(script, tmp_path / name, ranks=3)
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    assert torch.equal(one, two)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_models_train_with_same_result_as_gloo(tmp_path, kind):
    script = ranks.write(tmp_path, TRAINS)
    found = []
    for name in ("gloo", "paceline"):
        ranks.run(script, tmp_path / name, name, kind)
        found.append(torch.load(tmp_path / name))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-5)


SAYS_GLOO = """
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    other = dist.new_group()
    x = torch.ones(8)
    dist.all_reduce(x, group=other)
    groups = [getattr(one, "inner", one) if "Recorded" in type(one).__name__ else one
              for one in (dist.group.WORLD, other)]
    names = {type(one).__name__ for one in groups}
    print(dist.get_rank(), dist.get_backend(), *names, float(x.sum()), flush=True)
    dist.destroy_process_group()
    """


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ("", "ProcessGroup"),
        ("--exchange paceline", "SharedMemoryGroup"),
        ("--exchange paceline --record record", "SharedMemoryGroup"),
    ],
    ids=["plain", "asked", "recorded"],
)
def test_exchange_option_replaces_gloo_with_shared_memory(tmp_path, options, kind):
    script = ranks.write(tmp_path, SAYS_GLOO)
    done = ranks.run(script, launcher=f"paceline {options}")
    assert {f"{rank} gloo {kind} 16.0" for rank in (0, 1)} <= ranks.untagged(done.stdout)
    rings = sorted(tmp_path.glob("record/rank-*.ring"))
    assert len(rings) == 2 * ("--record" in options)
    for ring in rings:  # recorded, so that the diagnosis does not suggest this exchange
        data = ring.read_bytes()
        header = json.loads(data[48 : 48 + int.from_bytes(data[44:48], "little")])
        assert header["exchange"] == "paceline"


def test_unknown_exchange_is_rejected(tmp_path):
    script = ranks.write(tmp_path, SAYS_GLOO)
    done = ranks.run(script, launcher="paceline --exchange smoke", check=False)
    assert done.returncode == 2
    assert "--exchange must be 'paceline' or 'gloo'; this is 'smoke'" in done.stderr


HAS = "rank 0 calls all-reduce of 400,000 bytes as float32 (sum), and rank 1 calls"


@pytest.mark.parametrize("later", [[], ["later"]], ids=["waits", "later"])
def test_killed_rank_is_reported(tmp_path, later):
    done = ranks.run(ranks.write(tmp_path, FAILS), "dies", 30, *later, check=False)
    (line,) = re.findall(r"after ([\d.]+) s rank 0: (.*)", done.stdout)
    assert "all-reduce of 400,000 bytes as float32 (sum) can't continue: rank 1 has died" in line[1]
    assert float(line[0]) < 2  # 0.2 s if a core is idle
    assert "rank 1 was killed by SIGKILL" in done.stderr


def test_mismatched_collectives_and_timeouts_are_reported(tmp_path):
    done = ranks.run(ranks.write(tmp_path, FAILS), "size,type,call,sleeps", 1)
    said = dict(re.findall(r"(\w+) after [\d.]+ s rank 0: (.*)", done.stdout))
    assert f"{HAS} all-reduce of 280,000 bytes as float32 (sum)" in said["size"]
    assert f"{HAS} all-reduce of 400,000 bytes as float64 (sum)" in said["type"]
    assert f"{HAS} broadcast of 400,000 bytes from rank 0" in said["call"]
    assert (
        "rank 1 did not join within 1 s. HINT: check whether the rank is stopped" in said["sleeps"]
    )


FORKS = """
    import os
    import torch, torch.distributed as dist
    import paceline

    dist.init_process_group("paceline")
    x = torch.ones(8)
    dist.all_reduce(x)
    if os.fork() == 0:
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            print(dist.get_rank(), error, flush=True)
        os._exit(0)
    os.wait()
    dist.all_reduce(x)
    print(dist.get_rank(), "goes on", float(x[0]), flush=True)
    dist.destroy_process_group()
    """


def test_forked_process_cannot_exchange_and_rank_continues(tmp_path):
    done = ranks.run(ranks.write(tmp_path, FORKS))
    assert done.stdout.count("this process was forked from a rank") == 2
    assert done.stdout.count("goes on 4.0") == 2


LEAVES = """
    import time
    from paceline.comm.shared.async_collectives import CollectiveThread, PendingWork

    def run():
        while time.monotonic() < end:
            time.sleep(0)  # asks for the interpreter all the time

    threads = [CollectiveThread("paceline-exchange") for _ in range(4)]
    end = time.monotonic() + 0.5
    for thread in threads:
        thread.submit(PendingWork(run, []))
    """


def test_process_may_exit_while_a_collective_is_in_progress(tmp_path):
    script = ranks.write(tmp_path, LEAVES)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


PATIENT = """
    import torch, torch.distributed as dist
    import paceline

    world = paceline.init(timeout=float("inf"))
    x = torch.ones(8)
    dist.all_reduce(x)
    group = getattr(dist.group.WORLD, "inner", dist.group.WORLD)  # recorded
    print(type(group).__name__, float(x.sum()), flush=True)
    """


def test_init_without_time_limit(tmp_path):
    done = ranks.run(ranks.write(tmp_path, PATIENT), PACELINE_TESTS_WHOLE_END="1")
    assert {"SharedMemoryGroup 16.0"} <= ranks.untagged(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_kernel_passes_sanitizers(tmp_path, sanitizer):
    """Run every collective under a sanitizer, with threads of one process as ranks."""
    compiler = shutil.which("gcc")
    assert compiler, "HINT: make test-packages"
    program = tmp_path / "threads"
    source = Path(__file__).parent / "kernel_threads.c"
    flags = ["-std=c11", "-O1", "-g", "-DPLAIN", f"-fsanitize={sanitizer}", "-I", str(KERNEL)]
    flags += ["-fno-sanitize-recover=all", "-pthread", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(program), str(source)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "clean\n"


def test_numbers_go_to_a_device_of_the_group():
    numbers = torch.ones(2)
    of_both = SimpleNamespace(_device_types=[torch.device("meta"), torch.device("cpu")])
    assert exchangeable(numbers, of_both) is numbers
    of_gpus = SimpleNamespace(_device_types=[torch.device("meta")])
    assert exchangeable(numbers, of_gpus).device.type == "meta"


def test_tensors_of_the_host_are_in_shared_memory_on_nodes_with_gpus(monkeypatch):
    """All ranks decide alike then, also where only some nodes have GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "over_memory", lambda group, *_: (f"{group} in memory", ""))
    options = SimpleNamespace(
        store=dist.HashStore(), timeout=timedelta(seconds=1), global_ranks_in_group=[0]
    )
    assert backend._faster("group", options) == "group in memory"


def test_barrier_of_a_gpu_is_nccls():
    group = SimpleNamespace(
        inner=SimpleNamespace(barrier=lambda options: "of NCCL"), _start=lambda *_: "in memory"
    )
    options = dist.BarrierOptions()
    options.device = torch.device("cuda")
    assert SharedMemoryGroup.barrier(group, options) == "of NCCL"
    options.device = torch.device("cpu")
    assert SharedMemoryGroup.barrier(group, options) == "in memory"
