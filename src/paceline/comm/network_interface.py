"""Choice of the network interface of gloo and NCCL, by connections that are tried beforehand.

By default, gloo uses the address that its host's name resolves to. If this address is in another
network than those of the other hosts, ranks wait for each other until the timeout. Therefore one
rank of each host tries to connect to the other hosts (comm.reachable_address) as soon as all ranks
have started. All ranks get the result, or the error, through the store.
"""

import datetime
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from ..plurals import named_ranks
from .reachable_address import Listener, asked, choose, others_of, try_all, variables

NOTICE_INTERVAL_S = 10.0


def agree_on_interface(store: Any, rank: int, size: int, timeout: float) -> str:
    """Set those environment variables of network interfaces that are not set yet.

    Return the chosen interface and address, for messages; empty on a single host.

    Args:
        store: Store of all ranks, with a prefix that nothing else uses.
        timeout: Seconds to wait for ranks that have not started yet.

    Raises:
        ValueError: Some hosts cannot reach each other, or ranks are missing after ``timeout``. It
            is raised on all ranks, and the message says what was tried.
    """
    host = socket.gethostname()
    listener = None
    me = -1
    if store.add(f"at/{host}", 1) == 1:  # this is the first rank of its host
        me = store.add("hosts", 1) - 1
        listener = Listener(asked())
        store.set(f"offer/{me}", json.dumps({"host": host, **listener.offer()}))
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
    store.set(f"here/{rank}", "")
    if store.add("ranks", 1) == size:
        store.set("all", "here")
    try:
        _wait(store, "all", size, timeout, say=rank == 0)
        if me >= 0 and listener is not None:
            _try(store, me, listener, timeout)
        verdict = json.loads(_get(store, "verdict", timeout))
    finally:
        if listener is not None:
            listener.close()
    if "mistake" in verdict:
        raise ValueError(f"paceline.init: {verdict['mistake']}")
    if not verdict["chosen"]:
        return ""
    interface, address = verdict["chosen"][host]
    for name, value in variables(interface).items():
        os.environ.setdefault(name, value)
    return f"{interface} {address}"


def _try(store: Any, me: int, listener: Listener, timeout: float) -> None:
    """Try to reach other hosts from this one; on the first host, also publish the result."""
    hosts = store.add("hosts", 0)
    if hosts == 1:
        store.set("verdict", json.dumps({"chosen": {}}))
        return
    offers = {other: _offer(store, other, timeout) for other in others_of(me, hosts)}
    store.set(f"tried/{me}", json.dumps(try_all(offers)))
    if me != 0:
        return
    all_offers = [_offer(store, host, timeout) for host in range(hosts)]
    tried = {
        host: {int(k): v for k, v in json.loads(_get(store, f"tried/{host}", timeout)).items()}
        for host in range(hosts)
    }
    names = [offer["host"] for offer in all_offers]
    try:
        chosen = dict(zip(names, choose(names, all_offers, tried), strict=True))
        store.set("verdict", json.dumps({"chosen": chosen}))
    except ValueError as mistake:
        store.set("verdict", json.dumps({"mistake": str(mistake)}))


def _offer(store: Any, host: int, timeout: float) -> dict[str, Any]:
    offer: dict[str, Any] = json.loads(_get(store, f"offer/{host}", timeout))
    return offer


def _get(store: Any, key: str, timeout: float) -> bytes:
    store.wait([key], datetime.timedelta(seconds=timeout))
    data: bytes = store.get(key)
    return data


def _wait(store: Any, key: str, size: int, timeout: float, say: bool) -> None:
    """Wait until all ranks have started; with ``say``, print the missing ones every 10 s."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait([key], datetime.timedelta(seconds=max(0.1, min(left, NOTICE_INTERVAL_S))))
            return
        except RuntimeError:
            started = {rank for rank in range(size) if store.check([f"here/{rank}"])}
            absent = named_ranks(set(range(size)) - started)
            if left < NOTICE_INTERVAL_S:
                raise ValueError(
                    f"paceline.init: {absent} did not join within {timeout:.0f} s. HINT: check "
                    "that all ranks run; paceline.init(timeout=SECONDS) waits longer"
                ) from None
            if say:
                sys.stderr.write(f"paceline: waiting for {absent} ...\n")


def _answer(listener: Listener) -> None:
    """Send the token to every connecting process, until the listener is closed."""
    import selectors

    selector = selectors.DefaultSelector()
    for listening in listener.sockets.values():
        selector.register(listening, selectors.EVENT_READ, listening)
    while listener.sockets:
        for key, _ in selector.select(0.2):
            listener.answer(key.data)
    selector.close()
