"""The rank of ``paceline run --show-memory``: trace the script, print the table, and end."""

import io
import json
import os

from ...cost.layout_memory import LayoutMemory
from ...parallel.memory.survey import MemorySurvey, start_survey
from ...record.hooks import error_messages
from ...record.ring.launcher_messages import notify, send_to_launcher
from ...report.console import PlainConsole
from ...report.layout_memory import memory_json, render


def start_showing() -> MemorySurvey:
    """Trace the memory of the script that this process is about to run."""
    survey = start_survey(_show)
    error_messages.explanations.append(survey.explain)
    return survey


def _show(predicted: list[LayoutMemory], survey: MemorySurvey) -> None:
    """Print the table, and send the JSON to the launcher."""
    available = survey.available_bytes
    send_to_launcher(summary=json.dumps(memory_json(predicted, available)))
    text = io.StringIO()
    terminal = os.environ.get("PACELINE_TTY") == "1"
    width = int(os.environ.get("PACELINE_WIDTH", 0)) or 100
    console = PlainConsole(file=text, force_terminal=terminal, width=width)
    console.print(render(predicted, available, survey.problems))
    notify(text.getvalue())
