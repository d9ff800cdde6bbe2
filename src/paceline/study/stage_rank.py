"""The rank that stages on one host when ``paceline stage`` runs on several; see stage.py."""

import argparse
import json
import os
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ..cost.machine.units import size
from ..data.staging.fetch_shards import Staged
from ..data.staging.stage import stage
from ..plurals import counted
from ..record.ring.launcher_messages import notify, send_to_launcher

PROGRESS_INTERVAL_S = 10.0  # interval between progress lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("root")
    parser.add_argument("--room", type=int)
    parser.add_argument("--shared", action="store_true")
    args = parser.parse_args()
    first, waits = os.environ["RANK"] == "0", False
    due = time.monotonic() + PROGRESS_INTERVAL_S

    def ended(found: Staged) -> None:
        nonlocal waits
        waits = True

    def step(done: int, so_far: int) -> None:
        nonlocal due
        if first and time.monotonic() > due:
            due = time.monotonic() + PROGRESS_INTERVAL_S
            here = f"{socket.gethostname()} has {counted(done, 'more shard')}, {size(so_far)}"
            notify(f"paceline stage: {here}{', and waits for other hosts' if waits else ''}\n")

    try:
        found = stage(
            args.source,
            args.root,
            room=args.room,
            step=step,
            together=True,
            ended=ended,
            shared=args.shared,
        )
    except ValueError as mistake:
        sys.exit(f"{socket.gethostname()}: {mistake}")
    if first:
        alone = asdict(found) | {"folder": str(found.folder)}
        hosts = sorted(found.hosts or [alone], key=lambda host: str(host["host"]))
        send_to_launcher(summary=json.dumps({"hosts": hosts}))


if __name__ == "__main__":
    main()
