"""Observe the text that the rank writes, and the scalars that it logs for TensorBoard."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from ...hooks.taps import Tap
from ..facts.events import OutputFacts
from ..observation import Observation
from ..user_lines import user_line

_HOOK = "the output"
_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
MAX_LINES = 4096
MAX_CHARS = 500  # of a line


class Outputs:
    """The standard output and error of this process, and its TensorBoard writers.

    Args:
        observation: Receives the lines.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._parts = {"stdout": "", "stderr": ""}

    def install(self) -> None:
        """Replace ``write`` of both streams, which ``print`` and handlers of ``logging`` call."""
        for name in self._parts:
            stream: Any = getattr(sys, name)
            if stream is not None:
                stream.write = self._observed(name, stream.write)
        note = self._observation.observed(_HOOK, self._note_scalar)
        for module in _WRITERS:
            Tap(module, "SummaryWriter.add_scalar").before(note)

    def _note_scalar(self, _: Any, tag: Any, scalar_value: Any, *__: Any, **___: Any) -> None:
        self._add([f"{tag}: {float(scalar_value):.6e}"])

    def _observed(self, name: str, write: Callable[[str], Any]) -> Callable[[str], Any]:
        note = self._observation.guarded(_HOOK, self._note)

        @functools.wraps(write)
        def observed(text: str) -> Any:
            written = write(text)
            if self._observation.is_observed:
                note(name, text)
            return written

        return observed

    def _note(self, name: str, text: str) -> None:
        lines = (self._parts[name] + text.replace("\r", "\n")).split("\n")
        self._parts[name] = lines.pop()[-MAX_CHARS:]
        lines = [one for one in lines if one.strip()]
        if lines:
            self._add(lines)

    def _add(self, lines: list[str]) -> None:
        observation, line = self._observation, user_line()
        facts = observation.facts
        for one in lines[: MAX_LINES - len(facts.outputs)]:
            facts.outputs.append(
                OutputFacts(
                    text=one[:MAX_CHARS],
                    line=line,
                    phase=observation.phase,
                    step=observation.step,
                    collectives=len(facts.collectives),
                    batches=len(facts.batches),
                )
            )
