"""Hosts as threads of one process, connected by socket pairs.

They run every algorithm with the C implementation of its steps. As a program,
`python played.py LIBRARY` uses another build of the C library.
"""

import ctypes
import socket
import sys
import threading
from pathlib import Path

import numpy as np

from paceline.comm.hosts import c_wire
from paceline.comm.hosts.c_wire import StepError, Wire, encode_program
from paceline.comm.hosts.schedules import ALL_REDUCE, broadcast
from paceline.comm.shared.collective_calls import COLLECTIVES, DTYPES, REDUCTIONS, CollectiveCall

TIMEOUT = 20.0
SIZES = (0, 1, 1000, 300_001)  # elements


def connected(hosts):
    """Connect all hosts.

    Return, for each host, its file descriptors by peer; and the sockets, which have to stay
    referenced.
    """
    fds, kept = [{} for _ in range(hosts)], []
    for a in range(hosts):
        for b in range(a):
            pair = socket.socketpair()
            for one in pair:
                one.setblocking(False)
            fds[a][b], fds[b][a] = pair[0].fileno(), pair[1].fileno()
            kept += pair
    return fds, kept


class Together:
    """Hosts that run the same function, each in a thread.

    Attributes:
        errors: Exceptions by host.
    """

    def __init__(self, hosts):
        self.hosts, (fds, self.kept) = hosts, connected(hosts)
        self.broken = (ctypes.c_uint32 * 1)()
        self.wires = [
            Wire(hosts, me, fds[me], ctypes.addressof(self.broken)) for me in range(hosts)
        ]
        self.errors = {}

    def do(self, what):
        def one(me):
            try:
                what(me, self.wires[me])
            except StepError as error:
                self.errors[me] = error

        threads = [threading.Thread(target=one, args=(me,)) for me in range(self.hosts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self):
        for one in (*self.kept, *self.wires):
            one.close()


def call(op, dtype="float32", how="sum", nbytes=0, root=0):
    return CollectiveCall(
        COLLECTIVES.index(op), DTYPES.index(dtype), REDUCTIONS.index(how), root, nbytes
    )


def reduced(name, hosts, count, how="sum", dtype="float32"):
    """Run an all-reduce; return the vectors of all hosts before and after it."""
    draw = np.random.default_rng(count)
    each = [draw.standard_normal(count).astype(dtype) for _ in range(hosts)]
    return each, reduced_vectors(name, each, how)


def reduced_vectors(name, each, how="sum"):
    """Run an all-reduce of one vector from each host; return the vectors of all hosts after it."""
    hosts, together = len(each), Together(len(each))
    found = [one.copy() for one in each]

    def what(me, wire):
        steps = encode_program(ALL_REDUCE[name](found[me].nbytes, me, hosts))
        said = call("all-reduce", found[me].dtype.name, how, found[me].nbytes)
        wire.run(steps, found[me].ctypes.data, said, TIMEOUT)

    together.do(what)
    together.close()
    assert not together.errors, together.errors
    return found


def spread(hosts, count, root):
    """Broadcast a vector from host ``root``; return the vectors of all hosts."""
    together = Together(hosts)
    found = [np.full(count, float(me)) for me in range(hosts)]

    def what(me, wire):
        steps = encode_program(broadcast(found[me].nbytes, me, hosts, root))
        said = call("broadcast", nbytes=found[me].nbytes, root=root)
        wire.run(steps, found[me].ctypes.data, said, TIMEOUT)

    together.do(what)
    together.close()
    assert not together.errors, together.errors
    return found


if __name__ == "__main__":
    c_wire.LIBRARY_PATH = Path(sys.argv[1])
    for algorithm in ALL_REDUCE:
        for size in (2, 3, 5):
            for count in SIZES:
                before, after = reduced(algorithm, size, count)
                for one in after:
                    np.testing.assert_allclose(one, np.sum(before, 0), rtol=1e-5, atol=1e-5)
    for one in spread(5, 100_000, 3):
        assert (one == 3).all()
    print("clean")
