"""The end of a run: gather the records on rank 0, print the summary, leave the process group."""

import atexit
import datetime
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from ..checkpoint.saver import CheckpointSaver
from ..record.ring.launcher_messages import notify, send_to_launcher
from ..record.ring.recorder import Recorder
from ..security.outputs import write_output
from .process_group import leave_process_group

RECORD_TIMEOUT_S = 20.0  # then the summary lacks the rank


class RunFinalizer:
    """The tasks of ``world.close``. A run that failed prints no summary.

    Attributes:
        savers: The writers of the script's checkpoints.
    """

    def __init__(self, rank: int, size: int, store: Any, recorder: Recorder) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.recorder = recorder
        self.savers: list[CheckpointSaver] = []

    def run(self) -> None:
        failed = getattr(sys, "last_value", None) is not None  # an uncaught exception
        try:
            if not failed:
                for saver in self.savers:
                    saver.wait()
                self._summarize()
        # training has succeeded: do not fail the run because of its summary
        except Exception as error:
            notify(f"warning: Paceline could not compute the summary ({error})\n")
        finally:
            for saver in self.savers:
                saver.close()
            leave_process_group(failed)
        if not failed:
            for saver in filter(lambda saver: saver.failure, self.savers):
                _fail(
                    f"{saver.failure}, and {saver.describe_remaining()}. HINT: check the free "
                    f"space: df -h {saver.directory}"
                )

    def _summarize(self) -> None:
        if not self.recorder.enabled or self.recorder.step == 0:
            return
        if os.environ.get("PACELINE_TELLS") == "launcher":
            return  # the launcher has all records and prints the summary
        records, missing = self._gather()
        if self.rank:
            return
        from ..analyze.figures.report import analyse
        from ..analyze.records.load_run import Run
        from ..analyze.records.read_record import parse_record
        from ..report.run_verdict import run_json
        from ..report.terminal.run_report import show

        parsed = [parse_record(record) for record in records]
        report = analyse(Run("this run", parsed, missing, command=_command()))
        if report.steps:
            show(report)
        path = os.environ.get("PACELINE_SUMMARY")
        if path and not send_to_launcher(summary=run_json(report)):
            write_output(Path(path), run_json(report))

    def _gather(self) -> tuple[list[bytes], list[int]]:
        """Return all ranks' records on rank 0, and the ranks that did not send theirs in time."""
        own_record = zlib.compress(self.recorder.snapshot(), 1)
        if self.store is None:
            return [zlib.decompress(own_record)], []
        if self.rank:
            self.store.set(f"record/{self.rank}", own_record)
            return [], []
        records, missing = [zlib.decompress(own_record)], []
        timeout_s = RECORD_TIMEOUT_S
        for rank in range(1, self.size):
            try:
                self.store.wait([f"record/{rank}"], datetime.timedelta(seconds=timeout_s))
            except RuntimeError:
                missing.append(rank)
                timeout_s = 0.1
                continue
            records.append(zlib.decompress(self.store.get(f"record/{rank}")))
        return records, missing


_failed = False  # whether the run fails although the script has ended


def _fail(reason: str) -> None:
    """Let this process end with exit code 1."""
    global _failed
    _failed = True
    if not send_to_launcher(exception=reason, at=time.monotonic(), code=1):
        notify(f"paceline: error: {reason}\n")


@atexit.register  # before that of ``world.close``: exit handlers run in reverse order
def _end_failed_process() -> None:
    if _failed:  # an exit handler can't change the exit code in another way
        sys.stdout.flush()
        sys.stderr.flush()
        send_to_launcher(finished=1)
        os._exit(1)


def _command() -> list[str]:
    """Return the script with its arguments, as ``paceline run`` takes them."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return ["-m", spec.name, *sys.argv[1:]] if spec is not None else list(sys.argv)
