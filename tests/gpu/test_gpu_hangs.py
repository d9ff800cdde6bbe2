"""Hangs, failures and interrupts of ranks beside a busy GPU."""

import signal
import time

import pytest
import ranks
from on_gpu import run

pytestmark = [pytest.mark.gpu, pytest.mark.limit(120)]


HANG = """
    import os, sys, time, torch, torch.distributed as dist
    from torch import nn
    what = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = torch.device(DEVICE)
    model = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def wait_in_the_script():
        if device.type == "cuda" and what == "kernel":
            for _ in range(200):
                torch.cuda._sleep(2_000_000_000)
            torch.cuda.synchronize()  # a kernel that does not end
        while True:
            time.sleep(0.1)
    for step in range(1000):
        x = torch.randn(32, 64, device=device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 8 and rank == dist.get_world_size() - 1:
            wait_in_the_script()
        total = torch.ones((), device=device)
        dist.all_reduce(total)
"""


@pytest.mark.parametrize("what", ["kernel", "sleep"])
def test_hang_beside_a_busy_gpu_is_reported_and_ended(tmp_path, what):
    how = f"paceline --hang-timeout 10 --record {tmp_path / 'record'}"
    done = run(tmp_path, HANG, what, number=2, launcher=how, check=False, timeout=90)
    assert done.returncode == 124, done.stderr[-3000:]
    text = " ".join(done.stderr.split())
    assert "The job hangs: Paceline ends its ranks." in text
    assert "wait_in_the_script" in text, done.stderr[-2500:]
    assert "rank 1" in text


@pytest.mark.only_gpu
def test_hang_of_one_rank_in_a_kernel_is_reported(tmp_path):
    done = run(
        *(tmp_path, HANG, "kernel"),
        number=1,
        launcher=f"paceline --hang-timeout 6 --record {tmp_path / 'record'}",
        check=False,
        timeout=90,
    )
    assert done.returncode == 124, done.stderr[-3000:]
    assert "Rank 0 computes, so the job may be slow" in " ".join(done.stderr.split())
    assert "synchronize" in done.stderr, done.stderr[-2500:]


NCCL_HANG = """
    import time, torch, torch.distributed as dist, paceline
    world = paceline.init(progress=False, device="cuda", timeout=600)
    x = torch.ones(1 << 20, device="cuda")
    for step in range(20):
        dist.all_reduce(x)
    torch.cuda._sleep(2_000_000_000 * 100)
    dist.all_reduce(x)
    torch.cuda.synchronize()
"""


@pytest.mark.only_gpu
def test_job_with_a_busy_gpu_is_interrupted(tmp_path):
    script = ranks.write(tmp_path, NCCL_HANG + '    print("never")\n')
    job = ranks.start(
        ranks.command(script, ranks=1),
        cwd=tmp_path,
        stderr=open(tmp_path / "err", "w"),  # noqa: SIM115
    )
    ranks.wait_until(lambda: len(torch_processes(script)) > 0, 60)
    time.sleep(8)  # the rank is in its kernel
    job.send_signal(signal.SIGINT)
    assert job.wait(40) != 0
    ranks.wait_until(lambda: not torch_processes(script), 20)


def torch_processes(script):
    return ranks.alive(str(script))


FAILS = """
    import torch, paceline
    world = paceline.init(progress=False, device=DEVICE)
    table = torch.zeros(4, device=world.device)
    index = torch.tensor([0, 99], device=world.device)
    def out_of_range():
        return table[index]
    out_of_range()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
"""


def test_error_in_a_kernel_is_reported(tmp_path):
    done = run(tmp_path, FAILS, check=False)
    assert done.returncode not in (0, 124)
    assert "rank 0 failed" in done.stderr, done.stderr[-2000:]


RESTARTED = """
    import os, signal, torch, paceline
    from torch import nn
    world = paceline.init(progress=False, device=DEVICE)
    model = nn.Linear(8, 8)
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in world.epochs(6, checkpoint="ckpt"):
        for step in range(4):
            world.backward(model(torch.ones(2, 8, device=world.device)).mean())
            world.step(optimizer)
        if epoch == 3 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    print("ended", flush=True)
"""


def test_killed_rank_restarts_on_the_gpu(tmp_path):
    done = run(tmp_path, RESTARTED, launcher="paceline --max-restarts 2")
    assert "ended" in done.stdout
    assert "restart 1 of 2" in done.stderr
