"""Training in processes that ranks started themselves, and that are no ranks."""

from collections.abc import Sequence

from ...plurals import counted
from .read_record import Record


def untracked_training(records: Sequence[Record]) -> list[str]:
    """Return a sentence for each rank whose child processes trained without a process group."""
    found = []
    for record in records:
        if children := record.meta.get("children"):
            number = counted(children["count"], "child process", "child processes")
            found.append(
                f"training went on in {number} of rank {record.rank} that are not ranks: their "
                f"{counted(children['steps'], 'optimizer step')} are not recorded. HINT: start the "
                f"script with paceline run -n {children['count']}, or call "
                "torch.distributed.init_process_group in each of them"
            )
    return found
