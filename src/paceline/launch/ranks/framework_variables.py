"""Environment variables with rank and world size for other frameworks.

They are the equivalents of torchrun's RANK and WORLD_SIZE, so that scripts for these frameworks run
unchanged under ``paceline run``.

TensorFlow: TF_CONFIG, which tf.distribute.MultiWorkerMirroredStrategy reads. Every rank is a
worker. Ranks that share a host with GPUs select theirs by LOCAL_RANK, same as with PyTorch
(``tf.config.set_visible_devices``), because TensorFlow uses all visible GPUs.

JAX: ``jax.distributed.initialize()`` without arguments. From the environment alone JAX reads only
the coordinator's address and the devices. It gets world size and rank from the launchers that it
supports: each is a class that is added to a list when it is defined. ``introduce_to_jax`` defines
another one, before those of JAX: inside a Slurm step JAX's class would count the launcher's agents
as ranks.

Horovod: rank, size, local rank and cross rank, only for scripts that import horovod (see
``script_source.uses_horovod``): some libraries choose Horovod where HOROVOD_RANK is set.
An installed Horovod with several ranks also needs the rendezvous server of horovodrun, or MPI.
Paceline provides neither, so ``check_horovod`` refuses its ``init``.
"""

import errno
import functools
import ipaddress
import itertools
import json
import os
import random
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster.launcher_variables import HOROVODRUN_PORT
from ...cluster.topology.visible_gpus import gpu_count
from ..layout import Seat
from .host import Host

# Not overwritten: the user may have set these on purpose (another network interface, or a cluster
# with other tasks).
NOT_OVERWRITTEN = ("TF_CONFIG", "JAX_COORDINATOR_ADDRESS")
# Maximum length of TF_CONFIG, which lists all ranks. Linux limits a variable to twice this size.
MAX_TF_CONFIG_CHARS = 1 << 16
FIRST_PORT = 10_000  # well-known ports of services are below


@dataclass(frozen=True)
class Worker:
    """The network address of one rank.

    Attributes:
        host: Index of the host.
        local_rank: Local rank on the host.
        address: Address of the host that the other ranks can connect to.
        port: A free port of the host that no other rank uses.
    """

    host: int
    local_rank: int
    address: str
    port: int


def worker_addresses(seats: Sequence[Seat], hosts: Sequence[Host]) -> tuple[list[Worker], int]:
    """Return the address and a free port of each rank, and a port for JAX's coordinator.

    Raises:
        ValueError: A host does not have enough free ports.
    """
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
    workers: list[Worker],
    rank: int,
    coordinator: int,
    environment: dict[str, str],
    horovod: bool = False,
) -> dict[str, str]:
    """Return the environment variables of ``rank`` in addition to torchrun's and ``environment``.

    Variables in ``NOT_OVERWRITTEN`` that the user has set in ``environment`` are not returned.
    Inside a rank of another run they are, because there the existing values describe the other
    run. A TF_CONFIG that is too long for an environment variable (from about 3000 ranks) is not
    returned.

    Args:
        workers: Addresses of all ranks, in rank order.
        rank: Global rank.
        coordinator: A further free port on the host of rank 0.
        environment: Environment variables that are already set.
        horovod: Whether the script uses Horovod.
    """
    made = _tensorflow(workers, rank) | _jax(workers, rank, coordinator)
    inherited = "PACELINE_STATUS" in environment and "HOROVOD_RANK" in environment
    if horovod or inherited:
        made |= _horovod(workers, rank)
    if "PACELINE_STATUS" in environment:
        return made
    for name in NOT_OVERWRITTEN:
        if name in environment:
            made.pop(name, None)
    if "JAX_COORDINATOR_ADDRESS" not in made:
        made.pop("JAX_COORDINATOR_BIND_ADDRESS", None)  # applies only to our coordinator address
    return made


def _tensorflow(workers: list[Worker], rank: int) -> dict[str, str]:
    addresses = [_joined(worker.address, worker.port) for worker in workers]
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    text = json.dumps(config, separators=(",", ":"))
    return {"TF_CONFIG": text} if len(text) <= MAX_TF_CONFIG_CHARS else {}


def _jax(workers: list[Worker], rank: int, coordinator: int) -> dict[str, str]:
    address = _joined(workers[0].address, coordinator)
    made = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(len(workers)),
        "JAX_PROCESS_ID": str(rank),
    }
    if _is_number(workers[0].address):  # on the host itself a name may resolve differently
        made["JAX_COORDINATOR_BIND_ADDRESS"] = address  # JAX's default: all interfaces
    return made


def _horovod(workers: list[Worker], rank: int) -> dict[str, str]:
    worker_of_rank = workers[rank]
    # Horovod's cross communicator: the ranks with this local rank, at most one per host.
    cross = sorted(
        worker.host for worker in workers if worker.local_rank == worker_of_rank.local_rank
    )
    numbers = {
        "RANK": rank,
        "SIZE": len(workers),
        "LOCAL_RANK": worker_of_rank.local_rank,
        "LOCAL_SIZE": sum(worker.host == worker_of_rank.host for worker in workers),
        "CROSS_RANK": cross.index(worker_of_rank.host),
        "CROSS_SIZE": len(cross),
    }
    made = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
    return {**made, "HOROVOD_HOSTNAME": worker_of_rank.address}


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports that are currently free on all addresses of this host.

    The ports are not reserved: another program may bind one before the rank does. That is unlikely,
    because the search begins at a random port, outside the range of ephemeral ports.

    Raises:
        ValueError: Fewer than ``count`` ports are free.
    """
    low, high = _given_to_any()
    first = random.SystemRandom().randrange(FIRST_PORT, 65536)
    ports = [*range(first, 65536), *range(FIRST_PORT, first)]
    order = itertools.chain(  # ports outside the ephemeral range first
        (port for port in ports if not low <= port <= high),
        (port for port in ports if low <= port <= high),
    )
    found: list[int] = []
    with ExitStack() as held:  # bound until the end, so that no port is found twice
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
            "found. HINT: use fewer ranks on that node"
        )
    return found


def _given_to_any() -> tuple[int, int]:
    """Return the first and the last port of the kernel's ephemeral range."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def check_horovod(basics: Any) -> None:
    """Make ``hvd.init()`` of an installed Horovod an error where it does not find the other ranks.

    Without MPI it would wait for them in vain; with MPI each rank may be a world of its own. Called
    after the import of ``horovod.common.basics``.
    """
    original = basics.HorovodBasics.init

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        size = os.environ.get("HOROVOD_SIZE", "1")
        if size == "1" or HOROVODRUN_PORT in os.environ:
            return original(self, *args, **kwargs)
        error = ValueError(
            f"hvd.init(): the installed Horovod does not find the {size} ranks of paceline run, "
            "because it needs horovodrun or mpirun. HINT: paceline run --horovod ours, or "
            f"horovodrun -np {size} paceline record DIR {os.path.basename(sys.argv[0])}"
        )
        if not self.mpi_built() or os.environ.get("HOROVOD_CONTROLLER") == "gloo":
            raise error
        result = original(self, *args, **kwargs)
        if self.size() == 1:
            raise error
        return result

    basics.HorovodBasics.init = init


def introduce_to_jax(cluster: Any) -> None:
    """Make ``jax.distributed.initialize()`` find the ranks of ``paceline run``.

    Must be called right after the import of ``jax._src.clusters.cluster``: JAX tries the classes in
    the order of their definition.
    """

    # For mypy the base class has type Any, because JAX is not a dependency of Paceline.
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
            """Return the index of this rank's device, or None for all devices.

            A rank gets one device if the host has at least one per rank.
            """
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            return int(os.environ["LOCAL_RANK"]) if 1 < ranks <= gpu_count() else None
