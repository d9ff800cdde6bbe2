"""Names of the states in what people read. JSON and records have the keys of STATES."""

from ..analyze.figures.report import Report
from ..analyze.records.state_timeline import STATES

STATE_NAMES = {state: state for state in STATES} | {"starved": "core wait"}


def state_name(report: Report, state: str) -> str:
    """Return the name of a state in a report.

    Wait and transfer cannot be distinguished if the clocks could not be aligned.
    """
    if state == "transfer" and not report.clocks_aligned:
        return "wait or transfer"
    return STATE_NAMES.get(state, state)
