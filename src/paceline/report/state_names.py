"""Names of the states in what people read. JSON and records have the keys of STATES."""

from collections.abc import Mapping, Sequence

from ..analyze.figures.report import Report
from ..analyze.records.state_timeline import STATES

STATE_NAMES = {state: state for state in STATES} | {"starved": "core wait"}


def shown_states(states: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the states that a table of these ranks' shares has: bubble in pipelines only."""
    has_bubble = any(rank.get("bubble") for rank in states)
    return [name for name in STATES if name != "bubble" or has_bubble]


def state_name(report: Report, state: str) -> str:
    """Return the name of a state in a report.

    Wait and transfer cannot be distinguished if the clocks could not be aligned.
    """
    if state == "transfer" and not report.clocks_aligned:
        return "wait or transfer"
    return STATE_NAMES.get(state, state)
