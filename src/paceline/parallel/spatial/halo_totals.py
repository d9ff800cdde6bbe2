"""Messages, bytes and exposed time of halos by layer, for the record."""

import atexit
import time

from ...record.ring.header_schema import MAX_BLOCK_CHARS, MAX_HALO_LAYERS
from ...record.ring.recorder import update_all_headers

WRITE_INTERVAL_S = 1.0
FURTHER_LAYERS = "further layers"
MAX_NAMES_CHARS = 4096  # of all names together: the header has other fields


class HaloTotals:
    """Totals of this process since its first halo."""

    def __init__(self) -> None:
        self._layers: dict[str, list[float]] = {}  # exchanges, bytes, exposed ns
        self._start = self._last = self._written = 0.0

    @property
    def exposed_s(self) -> float:
        """Time in which this process waited for halos."""
        return sum(ns for _, _, ns in self._layers.values()) / 1e9

    def add(self, layer: str, received_bytes: int, exposed_ns: int) -> None:
        """Note one exchange of a layer, in forward or backward; write all now and then."""
        self._last = now = time.monotonic()
        if not self._start:
            self._start = now
            atexit.register(self.write)
        name = layer[:MAX_BLOCK_CHARS]
        if name not in self._layers:
            room = MAX_NAMES_CHARS - sum(map(len, self._layers))
            if len(self._layers) >= MAX_HALO_LAYERS - 1 or len(name) > room:
                name = FURTHER_LAYERS
        totals = self._layers.setdefault(name, [0, 0, 0])
        totals[0] += 1
        totals[1] += received_bytes
        totals[2] += exposed_ns
        if now - self._written >= WRITE_INTERVAL_S:
            self.write()

    def write(self) -> None:
        """Write the totals to the records of this process."""
        self._written = self._last
        layers = [
            [own, int(count), int(size), ns / 1e9]
            for own, (count, size, ns) in self._layers.items()
        ]
        update_all_headers(halos={"seconds": self._last - self._start, "layers": layers})


halo_totals = HaloTotals()
