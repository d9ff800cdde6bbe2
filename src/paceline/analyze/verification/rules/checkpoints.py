"""Checkpoints: who writes them, and which are loaded."""

from collections.abc import Iterator, Sequence

from ....record.training.facts.events import FileFacts
from ....record.training.facts.ranks import RankFacts
from ..mistakes import MISTAKES, Finding
from ..view import View


def written_by_all(view: View) -> Iterator[Finding]:
    """Find files that several ranks write at the same time."""
    writers: dict[tuple[str, int], dict[int, FileFacts]] = {}
    for rank, facts in enumerate(view.ranks):
        for one in facts.files:
            if one.is_save and not one.is_distributed:
                writers.setdefault((one.path, one.step), {})[rank] = one
    for (path, step), by_rank in writers.items():
        if len(by_rank) < 2:
            continue
        line = next(iter(by_rank.values())).line
        yield Finding(
            MISTAKES["checkpoint-written-by-all"],
            [line],
            f"{len(by_rank)} ranks write {path} after {step} steps: a file that several processes "
            "write at the same time can be damaged.",
            ranks=sorted(by_rank),
            step=step or None,
            values={"path": path, "ranks": len(by_rank)},
        )


def load_of(view: View, resumed: Sequence[RankFacts], saved: FileFacts) -> FileFacts | None:
    """Return where the resumed run loads a file before its first step, also if it was renamed."""
    before = {one.path for facts in view.ranks for one in facts.files if not one.is_save}
    for facts in resumed:
        for one in facts.files:
            if one.is_save or one.step:
                continue
            is_renamed = one.path not in before and one.keys == saved.keys
            if saved.path.startswith(one.path) or is_renamed:
                return one
    return None
