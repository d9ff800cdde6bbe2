"""Flood a listening port with unauthorized connections.

Idle connections are reopened when they are closed. Garbage connections send random data and are
made as fast as possible. The program needs only the standard library. It ends when no process
listens on the port any more, and prints the number of garbage connections made.

    python flood.py ADDRESS PORT [--idle 1000] [--garbage 10000] [--ready FILE]
    python flood.py --where FILE     # wait for a file that contains "--connect ADDRESS,PORT;..."

The FILE of --ready is created once all idle connections are open and the given number of garbage
connections was made. Garbage continues after that, unless the number is 0.
"""

import argparse
import contextlib
import os
import random
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Replacement for srun or mpirun: unauthorized clients know the port before the agents do, and have
# enough time to connect.
ANNOUNCED = """#!/bin/sh
case "$*" in *--connect*)
    printf '%s\\n' "$*" > where.part
    mv where.part where
    while [ ! -e go ]; do sleep 0.02; done
    date +%s.%N > released ;;
esac
exec {program} "$@"
"""
SWEEP_S = 0.25  # interval between checks for closed idle connections
PIECE = 100  # garbage connections opened between these checks
KEPT = 200  # maximum number of open garbage connections; the oldest is closed first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("port", nargs="?", type=int, default=0)
    parser.add_argument("--where", type=Path)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--garbage", type=int, default=10_000)
    parser.add_argument("--ready", type=Path)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    target = (args.address, args.port) if args.where is None else found_in(args.where)
    flood(target, args.idle, args.garbage, args.ready)


def announced(folder: Path, program: str) -> dict[str, str]:
    """Return environment variables that replace ``program`` of /usr/bin by a script.

    The script writes its arguments into the file ``where`` in the working directory, waits for the
    file ``go``, writes the time into ``released`` and runs the program.
    """
    path = folder / "bin" / program
    path.parent.mkdir(exist_ok=True)
    path.write_text(ANNOUNCED.format(program=f"/usr/bin/{program}"))
    path.chmod(0o755)
    return {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"}


@contextlib.contextmanager
def running(
    folder: Path, address: str, port: int, idle: int = 1000, garbage: int = 0
) -> Iterator[None]:
    """Run the flood in another process, after its first connections are open.

    ``folder`` is for a temporary file.
    """
    ready = folder / f"ready-{port}"
    words = [address, port, "--idle", idle, "--garbage", garbage, "--ready", ready]
    with subprocess.Popen([sys.executable, __file__, *map(str, words)]) as process:
        try:
            deadline = time.monotonic() + 20.0
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError("the strangers' connections were not made")
                time.sleep(0.01)
            yield
        finally:
            process.kill()


def found_in(path: Path) -> tuple[str, int]:
    """Wait for the file; return the first address and port after ``--connect``."""
    while not path.exists():
        time.sleep(0.01)
    words = path.read_text().split()
    address, port = words[words.index("--connect") + 1].split(";")[0].split(",")
    return address, int(port)


def flood(target: tuple[str, int], idle: int, garbage: int, ready: Path | None) -> None:
    silent: list[socket.socket] = []
    loud: list[socket.socket] = []
    sent, swept = 0, 0.0
    with contextlib.suppress(ConnectionRefusedError, ConnectionResetError, KeyboardInterrupt):
        while True:
            if time.monotonic() - swept > SWEEP_S:
                silent = still_open(silent)
                silent += [connected(target) for _ in range(idle - len(silent))]
                swept = time.monotonic()
            for _ in range(PIECE if garbage else 0):
                loud.append(connected(target))
                with contextlib.suppress(OSError):
                    loud[-1].send(nonsense())
                if len(loud) > KEPT:
                    loud.pop(0).close()
                sent += 1
            if ready is not None and sent >= garbage:
                ready.touch()
                ready = None
            if not garbage:
                time.sleep(SWEEP_S)
    print(sent)


def connected(target: tuple[str, int]) -> socket.socket:
    return socket.create_connection(target, timeout=10.0)


def still_open(connections: list[socket.socket]) -> list[socket.socket]:
    """Return the connections that the other side has not closed; received data is discarded."""
    poll = select.poll()
    by_fd = {one.fileno(): one for one in connections}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll(0):
        try:
            ended = by_fd[fd].recv(4096) == b""
        except OSError:
            ended = True
        if ended:
            by_fd.pop(fd).close()
    return list(by_fd.values())


def nonsense() -> bytes:
    return random.choice(
        [
            os.urandom(random.randrange(1, 300)),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            bytes(64),
            b'{"tag": "' + b"0" * 64 + b'", "rank": 1}\n',
            b"[" * 5000,
        ]
    )


if __name__ == "__main__":
    main()
