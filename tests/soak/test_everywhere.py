"""The same unchanged script under each launcher on several hosts.

The result has to equal that of a single process, and no processes or files may remain on any host.
`pytest -s` prints a table of the run times.
"""

import json
import os
import shlex
import signal
import sys
import time

import pytest
import ranks

import bed

pytestmark = pytest.mark.soak

TRAIN = """
    import json, os, torch, torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    world = paceline.init(seed=3, progress=False)
    x = torch.randn(192, 10, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :2].sum(1, keepdim=True)), 16, shuffle=True)
    loader = world.shard(loader, global_batch=16)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    model, optimizer = world.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
    losses, hosts = [], [os.uname().nodename]
    for _ in world.epochs(3):
        score = world.meter()
        for inputs, targets in world.batches(loader):
            loss = F.mse_loss(model(inputs), targets)
            world.backward(loss)
            world.step(optimizer)
            score.add(loss=loss * len(targets), count=len(targets))
        losses.append(score.ratio("loss", "count"))
    if world.size > 1:
        hosts *= world.size
        torch.distributed.all_gather_object(hosts, os.uname().nodename)
    if world.rank == 0:
        json.dump({"losses": losses, "hosts": hosts}, open("result", "w"))
    """
WAIT = """
    import os, sys, time, paceline
    world = paceline.init(progress=False)
    open(f"up-{world.rank}", "w")
    while not os.path.exists("fail") or world.rank == 0:
        time.sleep(0.05)
    raise RuntimeError("boom")
    """
RUN = f"{ranks.PACELINE} run"
PYTHON = sys.executable
TORCHRUN = (
    f"{ranks.BIN}/torchrun --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=host1:29533 "
    "--rdzv-id=7 --log-dir=logs"
)


def command(kind, hosts):
    """Return the command to type on the login host or, for sbatch, in the batch script."""
    n, names = len(hosts), ",".join(hosts)
    return {
        "paceline run -H": f"{RUN} -H {','.join(f'{host}:1' for host in hosts)} script.py",
        "paceline run in sbatch": f"exec {RUN} script.py",
        "paceline run in salloc": f"salloc -N{n} {RUN} script.py",
        "srun": f"srun -N{n} -n{n} {PYTHON} script.py",
        "mpirun": shlex.join(bed.mpirun(names, PYTHON, "script.py")),
        "mpiexec": shlex.join(bed.mpiexec(names, PYTHON, "script.py")),
        "torchrun": f"srun -N{n} -n{n} {TORCHRUN} --nnodes={n} script.py",
    }[kind]


KINDS = [
    *("paceline run -H", "paceline run in sbatch", "paceline run in salloc"),
    *("srun", "mpirun", "mpiexec", "torchrun"),
]


@pytest.fixture(scope="module")
def alone(hosts):
    """Return the losses of the script in a single process."""
    folder = hosts.new_folder()
    ranks.write(folder, TRAIN)
    hosts.run("host1", PYTHON, "script.py", cwd=folder, env=of_torch(folder))
    return json.loads((folder / "result").read_text())["losses"]


@pytest.fixture(scope="module")
def table():
    """Yield a dictionary of seconds by (kind, hosts), and print it at the end."""
    rows = {}
    yield rows
    print("\n\nOn 2 hosts:")
    for kind, n in rows:
        if n == 2:
            words = command(kind, ["host1", "host2"]).replace(f"{ranks.BIN}/", "")
            print(f"  {kind:24}{words}")
    print(f"\n  {'seconds, starts included':26}1 host   2 hosts  4 hosts")
    for kind in dict.fromkeys(kind for kind, _ in rows):
        print(f"  {kind:26}" + "".join(f"{rows.get((kind, n), 0):<9.1f}" for n in (1, 2, 4)))


def of_torch(folder):
    """Return environment variables that move PyTorch's cache out of /tmp."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}


# All launchers on 2 hosts; other numbers of hosts only for some.
ON = [(kind, 2) for kind in KINDS]
ON += [("paceline run -H", 1), ("srun", 1), ("paceline run -H", 4)]


@pytest.mark.parametrize(("kind", "n"), ON)
def test_script_has_same_result_under_each_launcher(
    hosts, slurm, mpi, shared_folder, alone, table, kind, n
):
    ranks.write(shared_folder, TRAIN)
    variables = {**slurm.variables, **mpi, **of_torch(shared_folder)}
    words = command(kind, slurm.nodes[:n])
    begun = time.monotonic()
    if kind == "paceline run in sbatch":
        job = slurm.batch(f"#!/bin/sh\n{words}\n", f"-N{n}", cwd=shared_folder, env=variables)
        assert slurm.wait(job) == "COMPLETED", (shared_folder / f"slurm-{job}.out").read_text()
    else:
        hosts.run("host0", *words.split(), cwd=shared_folder, env=variables)
    table[kind, n] = time.monotonic() - begun
    result = json.loads((shared_folder / "result").read_text())
    assert sorted(result["hosts"]) == slurm.nodes[:n]
    assert result["losses"] == pytest.approx(alone, rel=1e-5)
    nothing_left(slurm)


def nothing_left(slurm):
    ranks.wait_until(lambda: not any(x.startswith("job ") for x in slurm.left_over(0)), 10)
    assert slurm.left_over(8) == []


def fail(slurm, folder, process, job):
    (folder / "fail").touch()


def interrupt(slurm, folder, process, job):
    if process is None:
        slurm.cancel(job, "-s", "INT", "--batch")
    else:  # a terminal signals the process group of salloc's command, not that of salloc
        os.killpg(ranks.family(process.pid)[1 if job else 0], signal.SIGINT)


def cancel(slurm, folder, process, job):
    if job:
        slurm.cancel(job)
    else:
        process.terminate()


@pytest.mark.parametrize("end", [fail, interrupt, cancel])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_no_leftovers_after_failure_interrupt_or_cancel(hosts, slurm, shared_folder, kind, end):
    ranks.write(shared_folder, WAIT)
    variables = {**slurm.variables, **of_torch(shared_folder)}
    words = command(kind, slurm.nodes[:2])
    process, job = None, ""
    if kind == "paceline run in sbatch":
        job = slurm.batch(f"#!/bin/sh\n{words}\n", "-N2", cwd=shared_folder, env=variables)
    else:
        process = hosts.start("host0", *words.split(), cwd=shared_folder, env=variables)
    ranks.wait_until(lambda: len(list(shared_folder.glob("up-*"))) == 2, 40)
    if kind == "paceline run in salloc":
        job = slurm.run("squeue", "-h", "-o", "%i").stdout.strip()
    end(slurm, shared_folder, process, job)
    if process is None:
        slurm.wait(job, 20)
        said = (shared_folder / f"slurm-{job}.out").read_text()
    else:
        said = process.communicate(timeout=20)[1]
    assert "Paceline ended" in said
    nothing_left(slurm)
