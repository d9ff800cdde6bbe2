"""Run examples/patches.py, and count what ranks and their loader workers open and read, for
benchmarks/data/patches.py.

Arguments: file (the rank's number is added), and those of the example."""

import gc
import json
import os
import sys
from multiprocessing import active_children
from pathlib import Path

from paceline.record.ring.resource_usage import FileOpenCounter, bytes_read


def main() -> None:
    examples = Path(__file__).resolve().parents[3] / "examples"
    sys.path.insert(0, str(examples))
    import patches  # its imports are not counted

    file, sys.argv = sys.argv[1], [str(examples / "patches.py"), *sys.argv[2:]]
    opens, before = FileOpenCounter(), bytes_read("self")
    patches.main()
    gc.collect()
    if active_children():
        raise SystemExit("the loader's workers are still there: what they read can't be told")
    # what a process has read is its parent's once it has ended and was waited for
    asked, stored = (now - then for now, then in zip(bytes_read("self"), before, strict=True))
    told = {"opened": int(opens), "asked": asked, "stored": stored}
    Path(f"{file}{os.environ['RANK']}").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
