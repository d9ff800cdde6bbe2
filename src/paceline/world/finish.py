"""The end of a run: records to rank 0, the summary, and leaving."""

import datetime
import os
import sys
import zlib
from pathlib import Path
from typing import Any

from ..checkpoint.saver import CheckpointSaver
from ..record.ring.launcher_messages import notify, send_to_launcher
from ..record.ring.recorder import Recorder
from ..security.outputs import write_output
from .process_group import leave

GATHER_SECONDS = 20.0  # a rank that says nothing for so long is missing in the summary


class Finish:
    """What ``world.close`` does; once, and only after a run without an exception."""

    def __init__(self, rank: int, size: int, store: Any, recorder: Recorder) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.recorder = recorder
        self.saver: CheckpointSaver | None = None

    def run(self) -> None:
        failed = getattr(sys, "last_value", None) is not None  # an uncaught exception
        try:
            if not failed:
                if self.saver is not None:
                    self.saver.wait()
                self._summarise()
        except Exception as error:  # the run itself is done: never fail it for its summary
            notify(f"warning: no summary ({error})\n")
        finally:
            leave()

    def _summarise(self) -> None:
        if not self.recorder.enabled or self.recorder.step == 0:
            return
        if os.environ.get("PACELINE_TELLS") == "launcher":
            return  # it has all records itself
        records, missing = self._gather()
        if self.rank:
            return
        from ..analyze.figures.report import analyse
        from ..analyze.records.load_run import Run
        from ..analyze.records.read_record import parse_record
        from ..report.terminal.run_report import show

        report = analyse(Run("this run", [parse_record(record) for record in records], missing))
        if report.steps:
            show(report)
        path = os.environ.get("PACELINE_SUMMARY")
        if path and not send_to_launcher(summary=report.to_json()):
            write_output(Path(path), report.to_json())

    def _gather(self) -> tuple[list[bytes], list[int]]:
        """All ranks' records on rank 0, and the ranks that sent none in time."""
        own = zlib.compress(self.recorder.snapshot(), 1)
        if self.store is None:
            return [zlib.decompress(own)], []
        if self.rank:
            self.store.set(f"record/{self.rank}", own)
            return [], []
        records, missing = [zlib.decompress(own)], []
        patience = GATHER_SECONDS
        for rank in range(1, self.size):
            try:
                self.store.wait([f"record/{rank}"], datetime.timedelta(seconds=patience))
            except RuntimeError:
                missing.append(rank)
                patience = 0.1
                continue
            records.append(zlib.decompress(self.store.get(f"record/{rank}")))
        return records, missing
