"""Names of figures and states in what people read; JSON and records have their keys."""

from collections.abc import Mapping, Sequence

from ..analyze.figures.report import Report
from ..analyze.records.state_timeline import STATES
from . import document as doc
from .document import Part
from .numbers import percent

NAMES = {
    "samples_per_s": "samples/s",
    "step_ms": "step (ms)",
    "useful": "useful (the product)",
    "parallel": "parallel efficiency",
    "load_balance": "  load balance",
    "communication": "  communication efficiency",
    "serialisation": "    serialisation",
    "transfer": "    transfer",
    "checkpoint": "no checkpoint",
    "validation": "no validation",
    "input": "no wait for input",
    "starved": "no wait for a core",
    "other": "no other work",
    "bubble": "no pipeline bubble",
    "computation_scalability": "computation scalability",
    "global_efficiency": "global efficiency",
    "speedup": "speed-up",
    "scaling_efficiency": "scaling efficiency",
}
# Definitions whose key differs from that of the figure, or that have the name of a state.
TERMS = {
    "samples_per_s": "samples/s",
    "useful": "useful share",
    "transfer": "transfer efficiency",
    "speedup": "speed-up",
    **{
        name: f"no {name}"
        for name in ("checkpoint", "validation", "input", "starved", "other", "bubble")
    },
    **{
        name: name.replace("_", " ")
        for name in ("scaling_efficiency", "computation_scalability", "global_efficiency")
    },
}

# Of a change that is not known to be real
NOISE: Mapping[bool | None, str] = {
    None: "too few steps to distinguish it from noise",
    False: "within the noise",
}

# Efficiencies of a run, in the order of their tree; the last one is the product of the others.
EFFICIENCIES = (
    *("parallel", "load_balance", "communication", "serialisation", "transfer", "checkpoint"),
    *("validation", "input", "starved", "other", "bubble", "useful"),
)


def named_figure(name: str) -> Part:
    """Return the name of a figure, indented by its depth in the tree of efficiencies."""
    return Part(NAMES[name], term=TERMS.get(name, name))


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


def state_legend(names: Mapping[str, str], shares: Mapping[str, float] | None = None) -> doc.Legend:
    """Return the colours of states with their names, and with the shares of a run.

    Args:
        names: Name of each state.
        shares: Mean share of each state, or None.
    """
    colours = []
    for state, name in names.items():
        text: list[str | doc.Part] = [doc.Part(name, term=state)]
        if shares is not None:
            text += [" ", doc.Part(percent(shares[state]), figure=f"mean.{state}")]
        colours.append((state, text))
    return doc.Legend(colours)
