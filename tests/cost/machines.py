"""Artificial machines: hosts of one kind, with measurement noise."""

import random
from dataclasses import replace

from paceline.cost.machine.machine_file import (
    Arithmetic,
    AtSize,
    Collective,
    Figure,
    Gpu,
    HostFacts,
    Limits,
    Machine,
    Memory,
    Network,
    Pair,
    Storage,
)

GPU = "NVIDIA A100-SXM4-40GB"
UNITS = {"rate": "FLOP/s", "bandwidth": "B/s", "time": "s", "files": "files/s"}


class Maker:
    """Simulate measurements of a machine.

    Repetitions vary by ``noise``, parts of one kind by ``apart``; now and then a repetition is
    disturbed.
    """

    def __init__(self, seed=0, noise=0.01, apart=0.01, repeats=5):
        self.random = random.Random(seed)
        self.noise, self.apart, self.repeats = noise, apart, repeats

    def figure(self, value, unit, noise=None):
        noise = self.noise if noise is None else noise
        value *= 1 + self.apart * max(-3, min(3, self.random.gauss(0, 1)))
        drawn = [value * (1 + noise * abs(self.random.gauss(0, 1))) for _ in range(self.repeats)]
        if self.random.random() < 0.1:
            drawn[0] *= 3 if unit == "s" else 0.3
        return Figure.of(drawn, unit)

    def host(self, name, speed=1.0, gpus=0):
        devices = ["cpu", *(f"cuda:{i}" for i in range(gpus))]
        rates = {"float64": 1e12, "float32": 2e12}
        return HostFacts(
            name=name,
            processor="AMD EPYC 7763 64-Core Processor",
            sockets=2,
            cores=128,
            threads=128,
            numa_nodes=8,
            ranks=4,
            mask="0-127",
            memory_bytes=512 << 30,
            free_memory_bytes=500 << 30,
            free_disk_bytes=1 << 40,
            clock_offset_s=self.random.gauss(0, 1e-3),
            clock_uncertainty_s=1e-4,
            import_torch=self.figure(2.5, "s", 0.1),
            import_torch_busy=Figure(1.9, 1.8, 2.0, 3, "s"),
            import_torch_first_s=3.5,
            import_torch_first_busy_s=2.25,
            import_torch_calls=4012,
            versions={"python": "3.11.7", "torch": "2.6.0", "paceline": "0.1.0"},
            limits=Limits(1 << 20, 1 << 40, 8 << 20, 256 << 30, 255 << 30, 512 << 30),
            gpus=(Gpu(GPU, 40 << 30, 39 << 30),) * gpus,
            networks=(Network("mlx5_0", "InfiniBand", "200 Gb/sec (4X HDR)"),),
            arithmetic=tuple(
                Arithmetic(device, operation, precision, self.figure(rate * speed, "FLOP/s"))
                for device in devices
                for operation in ("matrix product", "convolution")
                for precision, rate in rates.items()
            ),
            memory=tuple(Memory(d, self.figure(3e11 * speed, "B/s")) for d in devices),
            storage=(
                Storage(
                    *("/scratch/data", "lustre", "out"),
                    read=self.figure(2e9, "B/s", 0.1),
                    write=self.figure(1e9, "B/s", 0.1),
                    small_read=self.figure(3000, "files/s", 0.1),
                ),
            ),
        )

    def machine(self, count, slow=(), gpus=0, links=True):
        """Return a machine; the hosts with the numbers in ``slow`` compute at 70 % of the speed."""
        names = [f"host{i}" for i in range(count)]
        hosts = tuple(
            self.host(name, 0.7 if i in slow else 1.0, gpus) for i, name in enumerate(names)
        )
        pairs = tuple(self.pair(a, b) for i, a in enumerate(names) for b in names[:i] if links)
        return Machine(
            "2026-01-31T12:00:00+00:00",
            hosts,
            command="paceline check -n 8",
            job="slurm 4711",
            collectives=(
                *(self.collective("in host", 8, (name,)) for name in names),
                self.collective("all", 8 * count, tuple(names)),
            ),
            pairs=pairs,
        )

    def pair(self, a, b, speed=1.0):
        latency, rate = 2e-6 / speed, 2e10 * speed
        return Pair(b, a, self.figure(latency, "s", 0.05), self.figure(rate, "B/s", 0.02))

    def collective(self, group, ranks, hosts):
        sizes = tuple(
            AtSize(8 << shift, self.figure(2e-5 + (8 << shift) / 1e9, "s")) for shift in (0, 10, 20)
        )
        latency = self.figure(2e-5, "s", 0.05)
        return Collective(group, "all-reduce", ranks, hosts, "gloo", "cpu", latency, sizes)


def with_host(machine, name, **changes):
    """Return the machine with changed fields of one host."""
    hosts = tuple(replace(h, **changes) if h.name == name else h for h in machine.hosts)
    return replace(machine, hosts=hosts)


def with_links(machine, maker, speed):
    """Return the machine with link speeds given by ``speed(host, host)``."""
    pairs = tuple(maker.pair(p.second, p.first, speed(p.first, p.second)) for p in machine.pairs)
    return replace(machine, pairs=pairs)
