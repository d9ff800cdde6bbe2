"""Messages between the launcher and agents: arbitrary bytes and signed content, in pieces."""

import os
from collections.abc import Iterator

from paceline.launch import channel
from paceline.launch.channel import FRAME_HEADER, START_MARKER, Channel, InvalidMessageError

channel.MAX_JSON_BYTES, channel.MAX_RAW_BYTES = 1 << 12, 1 << 12
channel.MAX_LOGIN_BYTES = 1 << 12
KEYS = (b"k" * 32, b"p" * 32)
RAW, RAW_WITH_KEYS, SIGNED, LOGIN = range(4)


def seeds() -> Iterator[bytes]:
    frame = FRAME_HEADER.pack(12, 3) + b'{"place": 0}' + b"abc"
    for mode in (RAW, RAW_WITH_KEYS):
        yield bytes([mode]) + frame
        yield bytes([mode]) + frame + channel._mac(KEYS[1], b"0", frame)
    yield bytes([SIGNED]) + b'{"died": 3, "status": -9, "at": 1e400, "why": "\\ud800"}'
    yield bytes([LOGIN]) + b"Welcome!\n" + START_MARKER + frame


def run(data: bytes) -> None:
    if not data:
        return
    mode, data = data[0] % 4, data[1:]
    if mode == SIGNED:
        data = FRAME_HEADER.pack(len(data), 0) + data
        data += channel._mac(KEYS[1], b"0", data)
    read_fd, write_fd = os.pipe()
    receiver = Channel(read_fd, read_fd, KEYS if mode in (RAW_WITH_KEYS, SIGNED) else None)
    try:
        os.set_blocking(write_fd, False)
        os.write(write_fd, data)  # the fuzzer's inputs fit into the pipe's buffer
        os.close(write_fd)
        if mode == LOGIN and receiver.skip_login_output(0.0) is None:
            return
        while (messages := receiver.receive()) is not None:
            for message, raw in messages:
                assert isinstance(message, dict)
                assert len(raw) <= channel.MAX_RAW_BYTES
    except InvalidMessageError:
        return
    finally:
        receiver._write_fd = receiver._read_fd
        os.close(read_fd)
