"""One host's part of ``paceline stage`` on several; see stage.py."""

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from ..cost.units import size
from ..data.staging import stage
from ..record.tell import say, to_launcher

EVERY_S = 10.0  # between two lines of progress


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("root")
    parser.add_argument("--room", type=int)
    args = parser.parse_args()
    first = os.environ["RANK"] == "0"
    due = time.monotonic() + EVERY_S

    def step(done: int, so_far: int) -> None:
        nonlocal due
        if first and time.monotonic() > due:
            due = time.monotonic() + EVERY_S
            say(f"paceline stage: {done:,} shards, {size(so_far)} on the first host\n")

    found = stage(args.source, args.root, room=args.room, step=step, together=True)
    if first:
        alone = asdict(found) | {"folder": str(found.folder)}
        hosts = sorted(found.hosts or [alone], key=lambda one: str(one["host"]))
        to_launcher(summary=json.dumps({"hosts": hosts}))


if __name__ == "__main__":
    main()
