"""Agreement on why a group failed: all ranks report the first reason, whichever rank had it."""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from ...plurals import named_ranks
from ..shared.collective_calls import (
    CollectiveCall,
    ExchangeError,
    mismatch_error,
    rank_died_error,
    timeout_error,
)
from .c_wire import BROKEN, CLOSED, DIFFERS, NO_MEMORY, SILENT, StepError
from .connect import Connections
from .rank_placement import RankPlacement

REASON_KEY = "why"  # in the store
STORE_TIMEOUT_S = 5.0  # the store's host may be lost as well


class FailureAgreement:
    """One rank's part of the agreement.

    connections: of this rank; they are closed so that its peers notice the failure. names: numbers
    of the group's ranks in the job.
    """

    def __init__(
        self,
        store: Any,
        placement: RankPlacement,
        connections: Connections,
        names: Sequence[int] = (),
    ) -> None:
        self._store, self._placement, self._connections = store, placement, connections
        self._global_ranks = list(names) or list(range(sum(map(len, placement.ranks_by_host))))
        self._reason = ""

    def raise_if_failed(self) -> None:
        """Raise the agreed error again once the group is broken.

        Its connections are closed then, and their descriptors may have been reused for other files.
        """
        if self._reason:
            raise ExchangeError(self._reason)

    def agree_on_error(
        self, error: ExchangeError | StepError, call: CollectiveCall, timeout: float
    ) -> ExchangeError:
        """Return the error that this rank raises.

        Only afterwards may the other ranks notice that this rank gives up.
        """
        if not self._reason:
            own_reason = (
                str(error)
                if isinstance(error, ExchangeError)
                else self._describe(error, call, timeout)
            )
            self._reason = self._agree_on_reason(own_reason)
        return ExchangeError(self._reason)

    def close(self) -> None:
        self._connections.close()

    def _agree_on_reason(self, own_reason: str) -> str:
        """Return the reason that was stored first, of all ranks'."""
        reasons = [own_reason]

        def ask_store() -> None:
            with contextlib.suppress(Exception):  # then this rank reports its own reason
                reasons.append(self._store.compare_set(REASON_KEY, "", own_reason).decode())

        asking = threading.Thread(target=ask_store, daemon=True)
        asking.start()
        asking.join(STORE_TIMEOUT_S)
        return reasons[-1]

    def _describe(self, error: StepError, call: CollectiveCall, timeout: float) -> str:
        own = self._global_ranks[self._placement.rank]
        if error.reason == NO_MEMORY:
            return f"{call}: rank {own} has no memory for the data from other nodes"
        if error.reason == BROKEN:
            where = self._placement.host_names[self._placement.host_index]
            return f"{call}: another rank on {where} lost its connections to other nodes"
        ranks = [self._global_ranks[rank] for rank in self._placement.ranks_by_host[error.host]]
        peer = ranks[min(self._placement.local_rank, len(ranks) - 1)]
        where = self._connections.descriptions.get(
            error.host, self._placement.host_names[error.host]
        )
        if error.reason == DIFFERS and error.peer_call is not None:
            return str(mismatch_error([(own, call), (peer, error.peer_call)]))
        if error.reason == CLOSED:
            return f"{rank_died_error(call, peer)}, or its connection was cut: {where}"
        if error.reason == SILENT and self._connections.is_unreachable(error.host):
            return (
                f"{call}: rank {own} received nothing from {where} for {timeout:g} s, not even an "
                "acknowledgement of its kernel. HINT: check that this node and its network are up"
            )
        others = [rank for rank in ranks if rank != peer]
        also = f", or waits for another rank of its node ({named_ranks(others)})" if others else ""
        return str(timeout_error(call, f"{peer} on {where}", timeout, also))
