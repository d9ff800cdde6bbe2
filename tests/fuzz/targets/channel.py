"""Messages between the launcher and agents: any bytes, and any signed content, in pieces."""

import os
from collections.abc import Iterator

from paceline.launch import channel
from paceline.launch.channel import BEGIN, HEAD, BrokenError, Channel

channel.MOST_JSON, channel.MOST_RAW = 1 << 12, 1 << 12
channel.MAX_LOGIN_BYTES = 1 << 12
KEYS = (b"k" * 32, b"p" * 32)
RAW, RAW_WITH_KEYS, SIGNED, LOGIN = range(4)


def seeds() -> Iterator[bytes]:
    frame = HEAD.pack(12, 3) + b'{"place": 0}' + b"abc"
    for mode in (RAW, RAW_WITH_KEYS):
        yield bytes([mode]) + frame
        yield bytes([mode]) + frame + channel._mac(KEYS[1], b"0", frame)
    yield bytes([SIGNED]) + b'{"died": 3, "status": -9, "at": 1e400, "why": "\\ud800"}'
    yield bytes([LOGIN]) + b"Welcome!\n" + BEGIN + frame


def run(data: bytes) -> None:
    if not data:
        return
    mode, data = data[0] % 4, data[1:]
    if mode == SIGNED:
        data = HEAD.pack(len(data), 0) + data
        data += channel._mac(KEYS[1], b"0", data)
    inlet, outlet = os.pipe()
    receiver = Channel(inlet, inlet, KEYS if mode in (RAW_WITH_KEYS, SIGNED) else None)
    try:
        os.set_blocking(outlet, False)
        os.write(outlet, data)  # the fuzzer's inputs fit into a pipe
        os.close(outlet)
        if mode == LOGIN and receiver.skip_greeting(0.0) is None:
            return
        while (messages := receiver.take()) is not None:
            for message, raw in messages:
                assert isinstance(message, dict)
                assert len(raw) <= channel.MOST_RAW
    except BrokenError:
        return
    finally:
        receiver._outlet = receiver._inlet
        os.close(inlet)
