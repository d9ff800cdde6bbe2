"""What all ranks say where one of them can't go on: the first reason, whichever rank had it."""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from ..shared.collective_calls import Call, ExchangeError, died, differ
from .c_wire import BROKEN, CLOSED, DIFFERS, NO_MEMORY, SILENT, StepError
from .connect import Connections
from .rank_placement import Places

WHY = "why"  # in the store
ASK_S = 5.0  # at most: the store may be lost as well


class Trouble:
    """met: this rank's connections, which are closed so that peers hear of it. names: the numbers
    of the group's ranks in the job."""

    def __init__(
        self, store: Any, places: Places, met: Connections, names: Sequence[int] = ()
    ) -> None:
        self._store, self._places, self._met = store, places, met
        self._names = list(names) or list(range(sum(map(len, places.ranks))))
        self._why = ""

    def look(self) -> None:
        """Raises what was told, once the group is broken: its connections are closed then, and
        their numbers may be those of other files."""
        if self._why:
            raise ExchangeError(self._why)

    def told(self, error: ExchangeError | StepError, call: Call, timeout: float) -> ExchangeError:
        """What this rank raises. Afterwards, not before, the others may hear that it gives up."""
        if not self._why:
            mine = (
                str(error) if isinstance(error, ExchangeError) else self._said(error, call, timeout)
            )
            self._why = self._first(mine)
        return ExchangeError(self._why)

    def close(self) -> None:
        self._met.close()

    def _first(self, mine: str) -> str:
        """Of all ranks' reasons, the one that was there first."""
        found = [mine]

        def ask() -> None:
            with contextlib.suppress(Exception):  # then the own reason is told
                found.append(self._store.compare_set(WHY, "", mine).decode())

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ASK_S)
        return found[-1]

    def _said(self, error: StepError, call: Call, timeout: float) -> str:
        if error.why == NO_MEMORY:
            return f"{call}: no memory for what comes from other hosts"
        if error.why == BROKEN:
            return f"{call}: another rank of this host lost other hosts"
        ranks = [self._names[rank] for rank in self._places.ranks[error.host]]
        peer = ranks[min(self._places.local, len(ranks) - 1)]
        where = self._met.of.get(error.host, self._places.names[error.host])
        if error.why == DIFFERS and error.theirs is not None:
            return str(differ([(self._names[self._places.rank], call), (peer, error.theirs)]))
        if error.why == CLOSED:
            return f"{died(call, peer)}, or its connection was cut: {where}"
        if error.why == SILENT and self._met.dark(error.host):
            return (
                f"{call}: the link to {where} carries nothing any more, for {timeout:g} s. HINT: "
                "is that host up, and its network?"
            )
        late = f"rank {peer} on {where} did not come within {timeout:g} s"
        if len(ranks) > 1:
            others = ", ".join(str(rank) for rank in ranks if rank != peer)
            late += f" (or waits for another one of its host: {others})"
        return (
            f"{call}: {late}. HINT: is it stopped, or does it compute for longer? A larger "
            "timeout= in init_process_group"
        )
