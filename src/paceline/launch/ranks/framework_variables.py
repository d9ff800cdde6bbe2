"""The names that other frameworks have for what torchrun calls RANK and WORLD_SIZE, so that
their scripts find their world under ``paceline run`` with no word of it.

TensorFlow: TF_CONFIG, which tf.distribute.MultiWorkerMirroredStrategy reads; every rank is a
worker. (Ranks that share a host with GPUs choose theirs as they do with PyTorch, by LOCAL_RANK:
``tf.config.set_visible_devices``; TensorFlow takes all it sees.)

JAX: ``jax.distributed.initialize()`` without arguments. From the environment alone it takes no
more than the coordinator's address and the devices; size and rank it takes from the launchers
that it knows, by classes that enter themselves in a list when they are defined.
``introduce_to_jax`` defines one more, before JAX's own: inside a Slurm step they would count the
launcher's agents for ranks.

Horovod: rank, size, local and cross, for scripts and libraries that read these. ``hvd.init()`` of
several ranks needs more than variables: the rendezvous server that horovodrun runs, or MPI.
Neither is provided here.
"""

import errno
import ipaddress
import json
import os
import random
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...cluster.topology.local_resources import devices
from ..layout import Seat

# What a user may have set for a purpose (another interface; a cluster with other tasks): kept.
KEPT = ("TF_CONFIG", "JAX_COORDINATOR_ADDRESS")
LONGEST = 1 << 16  # of TF_CONFIG, which names all ranks; Linux starts no program with twice that
FIRST_PORT = 10_000  # below are the ports that services are known by


@dataclass(frozen=True)
class Worker:
    """Where one rank is reached."""

    host: int  # which host, counted from 0
    local_rank: int
    address: str  # of the host, as the other ranks reach it
    port: int  # free there; no other rank's


class Host(Protocol):
    """On which ranks run."""

    address: str

    def free_ports(self, count: int) -> list[int]: ...


def places(seats: Sequence[Seat], hosts: Sequence[Host]) -> tuple[list[Worker], int]:
    """Where each rank is reached, on a port that is free now, and a port for JAX's coordinator."""
    counts = Counter(seat.host for seat in seats)
    ports = {
        number: hosts[number].free_ports(count + (number == 0)) for number, count in counts.items()
    }
    coordinator = ports[0].pop()
    workers = [
        Worker(
            seat.host, seat.local_rank, hosts[seat.host].address, ports[seat.host][seat.local_rank]
        )
        for seat in seats
    ]
    return workers, coordinator


def variables(
    workers: list[Worker], rank: int, coordinator: int, environment: dict[str, str]
) -> dict[str, str]:
    """What ``rank`` gets beside torchrun's variables and ``environment``.

    ``workers`` are all ranks', in rank order; ``coordinator`` is one more free port on rank 0's
    host. What the user has set in ``environment`` by himself (``KEPT``) is left out here, except
    inside a rank of another run, where it describes that run. So is a TF_CONFIG that is too long
    to be passed on (from about 3000 ranks).
    """
    made = _tensorflow(workers, rank) | _jax(workers, rank, coordinator) | _horovod(workers, rank)
    if "PACELINE_STATUS" in environment:
        return made
    for name in KEPT:
        if name in environment:
            made.pop(name, None)
    if "JAX_COORDINATOR_ADDRESS" not in made:
        made.pop("JAX_COORDINATOR_BIND_ADDRESS", None)  # it belongs to the address
    return made


def _tensorflow(workers: list[Worker], rank: int) -> dict[str, str]:
    addresses = [_joined(worker.address, worker.port) for worker in workers]
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    text = json.dumps(config, separators=(",", ":"))
    return {"TF_CONFIG": text} if len(text) <= LONGEST else {}


def _jax(workers: list[Worker], rank: int, coordinator: int) -> dict[str, str]:
    address = _joined(workers[0].address, coordinator)
    made = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(len(workers)),
        "JAX_PROCESS_ID": str(rank),
    }
    if _is_number(workers[0].address):  # a name may mean another address on the host itself
        made["JAX_COORDINATOR_BIND_ADDRESS"] = address  # JAX's default: every interface
    return made


def _horovod(workers: list[Worker], rank: int) -> dict[str, str]:
    mine = workers[rank]
    # Horovod's cross communicator: the ranks with this local rank, one a host at most.
    cross = sorted(worker.host for worker in workers if worker.local_rank == mine.local_rank)
    numbers = {
        "RANK": rank,
        "SIZE": len(workers),
        "LOCAL_RANK": mine.local_rank,
        "LOCAL_SIZE": sum(worker.host == mine.host for worker in workers),
        "CROSS_RANK": cross.index(mine.host),
        "CROSS_SIZE": len(cross),
    }
    made = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
    return {**made, "HOROVOD_HOSTNAME": mine.address}


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Different ports that were free on all addresses of this host a moment ago.

    They are not held: a rank binds its own, and another program may have taken it first. That is
    unlikely, not impossible: the search begins at random, outside of the range from which Linux
    gives ports to those that ask for any.
    """
    low, high = _given_to_any()
    first = random.SystemRandom().randrange(FIRST_PORT, 65536)
    order = [*range(first, 65536), *range(FIRST_PORT, first)]
    order.sort(key=lambda port: low <= port <= high)  # those outside come first
    found: list[int] = []
    with ExitStack() as held:  # all at once, so that no port is found twice
        for port in order:
            if len(found) == count:
                break
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                probe.close()
            else:
                found.append(port)
    if len(found) < count:
        raise ValueError(
            f"{count} free ports are needed on {socket.gethostname()}, and {len(found)} were "
            f"found. HINT: fewer ranks on that host"
        )
    return found


def _given_to_any() -> tuple[int, int]:
    """The first and the last port of the range that the kernel chooses from."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def introduce_to_jax(cluster: Any) -> None:
    """Make ``jax.distributed.initialize()`` find the ranks of ``paceline run``.

    To be called right after the import of ``jax._src.clusters.cluster``: the classes that are
    defined first are asked first.
    """

    # To the checker its base is anything: JAX is no dependency of ours.
    class Paceline(cluster.ClusterEnv):  # type: ignore[misc]
        name = "paceline"

        @classmethod
        def is_env_present(cls) -> bool:
            return "JAX_NUM_PROCESSES" in os.environ and "JAX_PROCESS_ID" in os.environ

        @classmethod
        def get_coordinator_address(cls, *_: Any, **__: Any) -> str:
            return os.environ["JAX_COORDINATOR_ADDRESS"]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["JAX_NUM_PROCESSES"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["JAX_PROCESS_ID"])

        @classmethod
        def get_local_process_id(cls) -> int | None:
            """The one device of this rank, where there is one for each; else it sees them all."""
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            return int(os.environ["LOCAL_RANK"]) if 1 < ranks <= devices() else None
