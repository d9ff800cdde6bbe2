"""Hosts that a job has lost, and that come back: each is tried again and again, until it is ready
to have ranks."""

import threading
from collections.abc import Callable

from ..remote.remote_host import There
from ..remote.start_agents import Contact

FIRST_SECONDS, MOST_SECONDS = 2.0, 30.0  # between two tries; each waits twice as long
LEAVE_SECONDS = 5.0  # for the threads, once the job is over


class Returning:
    """Reaches for hosts that are waited for, a thread for each.

    contact: a new way to a host, by its place among the job's. prepare: makes it ready for ranks;
    raises ValueError where it can't be.
    """

    def __init__(
        self, contact: Callable[[int], Contact], prepare: Callable[[int, There], None]
    ) -> None:
        self._contact, self._prepare = contact, prepare
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._contacts: list[Contact] = []
        self._preparing: dict[int, There] = {}
        self._ready: dict[int, There] = {}
        self._threads: dict[int, threading.Thread] = {}

    def wait_for(self, place: int) -> None:
        """From now on until it is there."""
        if place in self._threads and self._threads[place].is_alive():
            return
        thread = threading.Thread(target=self._wait_for, args=(place,), daemon=True)
        self._threads[place] = thread
        thread.start()

    def ready(self) -> list[int]:
        """The places of those that could have ranks now."""
        with self._lock:
            return sorted(place for place, host in self._ready.items() if not host.trouble)

    def take(self) -> dict[int, There]:
        """Those that could have ranks now, to keep. One that was lost again is tried again."""
        with self._lock:
            found, self._ready = self._ready, {}
        for place in [place for place, host in found.items() if host.trouble]:
            del found[place]
            self.wait_for(place)
        return found

    def close(self) -> list[There]:
        """Nobody is waited for any more; the hosts that are ready and were not taken."""
        self._over.set()
        with self._lock:
            left, self._ready = list(self._ready.values()), {}
            for host in self._preparing.values():
                host.give_up()
            reaching = [contact for contact in self._contacts if not contact.hosts]
        for contact in reaching:
            contact.close()
        for thread in self._threads.values():
            thread.join(LEAVE_SECONDS)
        return left

    def disconnect(self) -> None:
        """Once the agents that were reached have been told to end."""
        for contact in self._contacts:
            contact.close()

    def _wait_for(self, place: int) -> None:
        wait = FIRST_SECONDS
        while not self._over.wait(wait):
            contact = self._contact(place)
            with self._lock:
                self._contacts.append(contact)
            try:
                (host,) = contact.make()
                with self._lock:
                    if self._over.is_set():
                        raise ValueError("the job is over")
                    self._preparing[place] = host
                self._prepare(place, host)
                with self._lock:
                    self._ready[place] = self._preparing.pop(place)
                return
            except (ValueError, OSError):
                contact.close()
                with self._lock:
                    self._preparing.pop(place, None)
                    self._contacts.remove(contact)
            wait = min(2 * wait, MOST_SECONDS)
