"""Client of PMI, a small key-value store of MPICH's and Intel MPI's mpiexec, and of Flux.

The protocol is lines of text over the file descriptor in PMI_FD. This is version 1 of PMI's wire
protocol (Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale
Systems", EuroMPI 2010; MPICH's simple_pmi.c). It implements only what a rendezvous needs: one value
from rank 0 to all ranks.
"""

import os
import select
from collections.abc import Mapping

READ_BYTES = 1024  # bytes per read


class Pmi:
    """This process's PMI connection.

    Raises:
        ValueError: The launcher does not answer in version 1 of the protocol.
    """

    def __init__(self, environment: Mapping[str, str], timeout: float = 600.0) -> None:
        self._fd = int(environment["PMI_FD"])
        self._timeout = timeout
        self._buffer = b""
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        self._name = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, value: str) -> None:
        """Store a value, which must not contain blanks."""
        self._ask(f"put kvsname={self._name} key={key} value={value}", "put_result")

    def barrier(self) -> None:
        """Wait for all ranks. Values that were put before are visible to all ranks afterwards."""
        self._ask("barrier_in", "barrier_out")

    def get(self, key: str) -> str:
        return self._ask(f"get kvsname={self._name} key={key}", "get_result")["value"]

    def finalize(self) -> None:
        """End the connection. Without this, mpiexec treats the end of the process as a crash."""
        self._ask("finalize", "finalize_ack")

    def _ask(self, command: str, expected: str) -> dict[str, str]:
        try:
            os.write(self._fd, f"cmd={command}\n".encode())
            answer = dict(word.partition("=")[::2] for word in self._line().split())
        except OSError as error:
            raise ValueError(f"PMI_FD={self._fd}: {error.strerror}") from None
        if answer.get("cmd") != expected or answer.get("rc", "0") != "0":
            raise ValueError(
                f"PMI_FD={self._fd}: the launcher answered {command.split()[0]} with {answer}"
            )
        return answer

    def _line(self) -> str:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while b"\n" not in self._buffer:
            if not poll.poll(self._timeout * 1000):
                raise ValueError(
                    f"PMI_FD={self._fd}: the launcher has not answered for {self._timeout:.0f} s. "
                    "HINT: call paceline.init() on all ranks"
                )
            data = os.read(self._fd, READ_BYTES)
            if not data:
                raise ValueError(f"PMI_FD={self._fd}: the launcher has closed the connection")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")


def from_rank_0(
    environment: Mapping[str, str], rank: int, key: str, value: str, timeout: float = 600.0
) -> str:
    """Return rank 0's ``value`` on all ranks.

    Raises:
        ValueError: Some ranks have not called this function within ``timeout`` seconds.
    """
    pmi = Pmi(environment, timeout)
    if rank == 0:
        pmi.put(key, value)
    pmi.barrier()
    found = pmi.get(key)
    pmi.finalize()
    return found
