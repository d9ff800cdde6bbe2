"""Order of GPU work between the threads that submit operations and the one that exchanges them.

A tensor is ready when the stream that was current at its submission has come so far, and the stream
that is current where its result is waited for goes on after the exchange. The host does not wait.
Operations of CPU tensors have no events.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .operation import Operation


class DeviceStreams:
    """The streams on which one process set exchanges tensors, one for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def note_submission(self, operation: Operation) -> None:
        """Note how far the current stream has to be before the operation may begin."""
        if operation.inputs[0].is_cuda:
            stream = torch.cuda.current_stream(operation.inputs[0].device)
            operation.event = stream.record_event()

    @contextlib.contextmanager
    def exchange(self, operations: Sequence[Operation]) -> Iterator[None]:
        """Run the body on the exchange's stream, after the submitted tensors are ready."""
        ours = [one for one in operations if one.event is not None]
        if not ours:
            yield
            return
        device = ours[0].inputs[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        for operation in ours:
            stream.wait_event(operation.event)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
            done = stream.record_event()
        for operation in ours:
            operation.event = done

    def follow(self, operation: Operation) -> None:
        """Let the current stream go on after the operation, whose results it may then use."""
        stream = torch.cuda.current_stream(operation.inputs[0].device)
        stream.wait_event(operation.event)
        for output in operation.outputs or ():
            output.record_stream(stream)  # it may belong to the exchange's stream
