"""Hosts that fail in turn and return, and launchers that are killed.

Each fault has to be named correctly. The job continues on the remaining hosts, and at full size
once the lost host is back.
"""

import json
import os
import random
import re
import signal
import threading

import pytest
import ranks
import torch

pytestmark = pytest.mark.soak
SEED = int(os.environ["PACELINE_SEED"])
FAULTS = int(os.environ.get("PACELINE_SOAK_FAULTS", 50))
OF_HOSTS, OF_LAUNCHERS = FAULTS * 24 // 100, FAULTS * 16 // 100

# After each step, rank 0 writes the epoch, the step and the number of ranks to the file "at". The
# job trains until the epoch in the file "last" is over. float64 and tolerances, because one rank
# and two ranks sum in different orders.
TRAIN = """
    import json, os, sys, time
    import torch, torch.distributed as dist
    import paceline

    torch.set_default_dtype(torch.float64)
    world = paceline.init(seed=1, progress=False)
    torch.manual_seed(0)
    data = [(torch.randn(16), torch.randn(4)) for _ in range(64)]
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = world.distribute(model, optimizer)
    loader = world.shard(torch.utils.data.DataLoader(data, shuffle=True, batch_size=1),
                         global_batch=4)
    last = int(sys.argv[1]) if len(sys.argv) > 1 else None
    for epoch in world.epochs(100_000, checkpoint="run", every="3steps"):
        if last is None:
            over = torch.tensor(float(os.path.exists("last") and int(open("last").read()) <= epoch))
            if world.size > 1:
                dist.broadcast(over, 0)
        else:
            over = last <= epoch
        if over:
            break
        for x, y in world.batches(loader):
            world.backward(torch.nn.functional.mse_loss(model(x), y))
            world.step(optimizer)
            if last is None:
                time.sleep(0.02)
                if world.rank == 0:
                    with open("at.part", "w") as file:
                        json.dump({"epoch": epoch, "step": world._recorder.step,
                                   "size": world.size}, file)
                    os.replace("at.part", "at")
    if world.rank == 0:
        plain = model.module if hasattr(model, "module") else model
        torch.save(plain.state_dict(), "model.pt")
    """


class Job:
    """A job with its launcher on host0 and ranks on host1 and host2."""

    def __init__(self, hosts, folder, *words):
        self.folder = folder
        command = [ranks.PACELINE, "run", *words, "-H", "host1,host2", "script.py"]
        self.process = hosts.start("host0", *command, cwd=folder, env={"NO_COLOR": "1"})
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.said += line

    def at(self):
        path = self.folder / "at"
        return json.loads(path.read_text()) if path.exists() else {"epoch": 0, "step": 0, "size": 0}

    def trains(self, steps, size=2):
        """Wait until ``size`` ranks have made ``steps`` more steps."""
        (self.folder / "at").unlink(missing_ok=True)
        self.wait(lambda: self.at()["size"] == size)
        first = self.at()["step"]
        self.wait(lambda: self.at()["step"] >= first + steps and self.at()["size"] == size)

    def says(self, text, after):
        """Wait for a message that contains ``text``, after the first ``after`` characters."""
        self.wait(lambda: text in " ".join(self.said[after:].split()))

    def wait(self, condition):
        try:
            ranks.wait_until(condition, 60)
        except AssertionError:
            raise AssertionError(f"{self.said[-3000:]}\nseed {SEED}") from None

    def end(self, folder):
        """Let the job end after three more epochs; return its last epoch."""
        last = self.at()["epoch"] + 3
        (folder / "last").write_text(str(last))
        assert self.process.wait(60) == 0, self.said[-3000:]
        return last


def undisturbed(folder, last):
    """Return the parameters of an undisturbed run of one rank."""
    alone = folder / "alone"
    alone.mkdir()
    ranks.run(ranks.write(alone, TRAIN), last, ranks=1)
    return torch.load(alone / "model.pt")


def same(folder, last):
    expected, found = undisturbed(folder, last), torch.load(folder / "model.pt")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)


def crash(hosts, host):
    hosts.crash(host)
    return "was lost with its node: its agent has ended, or the connection broke"


def power(hosts, host):
    hosts.link(host, False)
    hosts.crash(host)
    return f"{host} does not answer: it may have lost power or its network"


def cut(hosts, host):
    hosts.link(host, False)
    return f"{host} does not answer: it may have lost power or its network"


def agent(hosts, host):
    hosts.run(host, "pkill", "-KILL", "-o", "-f", "paceline.launch.host_agent")
    return "was lost with its node: its agent has ended, or the connection broke"


def heal(hosts, host):
    if not hosts.up(host):
        hosts.boot(host)
    hosts.link(host, True)


def test_job_continues_while_hosts_fail_and_return(hosts, shared_folder):
    print(f"PACELINE_SEED={SEED}")
    draw = random.Random(SEED)
    kinds = [(crash, power, cut, agent)[number % 4] for number in range(OF_HOSTS)]
    draw.shuffle(kinds)
    ranks.write(shared_folder, TRAIN)
    words = ["--max-restarts", OF_HOSTS, "--min-hosts", "1", "--hang-timeout", "1.5"]
    job = Job(hosts, shared_folder, *words)
    for kind in kinds:
        host = draw.choice(["host1", "host2"])
        job.trains(draw.randrange(4, 12))
        before = len(job.said)
        named = kind(hosts, host)
        job.says(f"{host} is lost; the job continues on 1 of 2 nodes, with 1 of 2 ranks", before)
        said = " ".join(job.said[before:].split())
        assert named in said, (kind.__name__, host, said)
        job.trains(2, size=1)
        heal(hosts, host)
        job.says(f"{host} is back; the job continues on 2 of 2 nodes, with 2 of 2 ranks", before)
    job.trains(2)
    same(shared_folder, job.end(shared_folder))
    assert re.findall(r"from the last checkpoint \(restart (\d+) of", job.said) == [
        str(number + 1) for number in range(OF_HOSTS)
    ]
    assert hosts.left_over(10) == []


def test_job_resumes_after_launcher_or_agent_is_killed(hosts, shared_folder):
    """The same command resumes from the last checkpoint; no process of the killed job remains."""
    print(f"PACELINE_SEED={SEED}")
    draw = random.Random(SEED)
    ranks.write(shared_folder, TRAIN)
    for _ in range(OF_LAUNCHERS):
        job = Job(hosts, shared_folder)
        job.trains(draw.randrange(2, 10))
        victim = draw.choice(["launcher", "host1", "host2"])
        if victim == "launcher":
            os.kill(job.process.pid, signal.SIGKILL)
            assert job.process.wait(10) == -signal.SIGKILL
        else:
            agent(hosts, victim)
            assert job.process.wait(20) == 137, job.said
            # "the connection broke" alone if the launcher's write fails before it reads the end.
            text = f"on {victim} was lost with its node: "
            assert text in " ".join(job.said.split())
        assert hosts.left_over(10) == []
    job = Job(hosts, shared_folder)
    job.trains(2)
    same(shared_folder, job.end(shared_folder))
