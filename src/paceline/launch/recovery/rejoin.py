"""Connect to hosts that a job has lost or that are new, until they are ready to have ranks."""

import threading
from collections.abc import Callable

from ..remote.remote_host import RemoteHost
from ..remote.start_agents import AgentConnections

# between two attempts; each wait is twice as long as the one before
FIRST_RETRY_S, MAX_RETRY_S = 2.0, 30.0
JOIN_TIMEOUT_S = 5.0  # for the threads to end


class LostHostWatcher:
    """Connect to lost and new hosts, with a thread for each.

    Args:
        connect: Makes a new connection to a host, by its index among the job's hosts.
        prepare: Makes the host ready for ranks; raises ValueError where that is impossible.
        report: Called with the reason when an attempt has failed.
    """

    def __init__(
        self,
        connect: Callable[[int], AgentConnections],
        prepare: Callable[[int, RemoteHost], None],
        report: Callable[[int, str], None] = lambda host_index, reason: None,
    ) -> None:
        self._connect, self._prepare, self._report = connect, prepare, report
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._connections: list[AgentConnections] = []
        self._preparing: dict[int, RemoteHost] = {}
        self._ready: dict[int, RemoteHost] = {}
        self._threads: dict[int, threading.Thread] = {}

    def wait_for(self, host_index: int) -> None:
        """Try to connect to a host until that succeeds."""
        if host_index in self._threads and self._threads[host_index].is_alive():
            return
        thread = threading.Thread(target=self._wait_for, args=(host_index,), daemon=True)
        self._threads[host_index] = thread
        thread.start()

    def ready(self) -> dict[int, RemoteHost]:
        """Return hosts that could have ranks now, by index."""
        with self._lock:
            return {
                host_index: host
                for host_index, host in sorted(self._ready.items())
                if not host.failure
            }

    def take_ready(self) -> dict[int, RemoteHost]:
        """Return hosts that could have ranks now, and hand them over. Retry those that were lost
        again.
        """
        with self._lock:
            ready_hosts, self._ready = self._ready, {}
        for host_index in [host_index for host_index, host in ready_hosts.items() if host.failure]:
            del ready_hosts[host_index]
            self.wait_for(host_index)
        return ready_hosts

    def close(self) -> list[RemoteHost]:
        """Stop waiting. Return the hosts that are ready and were not taken."""
        self._closing.set()
        with self._lock:
            ready_hosts, self._ready = list(self._ready.values()), {}
            for host in self._preparing.values():
                host.give_up()
            unconnected = [connection for connection in self._connections if not connection.hosts]
        for connection in unconnected:
            connection.close()
        for thread in list(self._threads.values()):
            thread.join(JOIN_TIMEOUT_S)
        return ready_hosts

    def disconnect(self) -> None:
        """Close the connections; call this after the agents were asked to end."""
        for connection in self._connections:
            connection.close()

    def _wait_for(self, host_index: int) -> None:
        wait = FIRST_RETRY_S
        while not self._closing.wait(wait):
            connection = self._connect(host_index)
            with self._lock:
                self._connections.append(connection)
            try:
                (host,) = connection.start()
                with self._lock:
                    if self._closing.is_set():
                        raise ValueError("the job is over")
                    self._preparing[host_index] = host
                self._prepare(host_index, host)
                with self._lock:
                    self._ready[host_index] = self._preparing.pop(host_index)
                return
            except (ValueError, OSError) as error:
                connection.close()
                if not self._closing.is_set():
                    self._report(host_index, str(error))
                with self._lock:
                    self._preparing.pop(host_index, None)
                    self._connections.remove(connection)
            wait = min(2 * wait, MAX_RETRY_S)
