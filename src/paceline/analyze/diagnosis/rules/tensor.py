"""Rule for the exchange of activations between the ranks of a tensor axis."""

from typing import Any

from ....cost.machine.units import size
from ....plurals import counted
from ...figures.process_groups import Collective, Group
from ...sharding.block_exchange import TENSOR
from ..evidence import Evidence, NamedCause

MAX_LISTED_LAYERS = 8


def tensor_exchange(
    e: Evidence, group: Group, calls: Collective, figures: dict[str, Any], line: str
) -> NamedCause | None:
    """Return the cause if the costliest group is one of a tensor axis.

    Args:
        figures: Those of the collective, which the evidence has as well.
        line: Text of the line with most of the time; "" if it is unknown.
    """
    if group.axis != TENSOR:
        return None
    host = dict(zip(e.report.ranks, e.report.hosts, strict=True))
    hosts = len({host[rank] for rank in group.ranks})
    where = f" on {hosts} nodes" if hosts > 1 else ""
    sentence = (
        f"the {group.size} ranks{where} of the tensor axis exchange activations in each divided "
        f"layer: {counted(calls.count / e.steps, 'call')} of {calls.name} per step with "
        f"{size(calls.bytes / max(calls.count, 1))} each, which computing does not hide{line}"
    )
    layers = sorted(e.report.layers, key=lambda one: -one.exposed_s())[:MAX_LISTED_LAYERS]
    if layers:
        each = 1e3 * layers[0].exposed_s()
        sentence += f"; most in {layers[0].name}, {each:.3g} ms of a step"
    listed = [{"name": one.name, "exposed_s": one.exposed_s()} for one in layers]
    found = {"extent": group.size, "hosts": hosts, "layers": listed}
    return "tensor-exchange", sentence, figures | found
