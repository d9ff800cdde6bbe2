"""Rules for the communication of models in parts: sharded (FSDP2), divided layers, pipelines."""

from dataclasses import asdict
from typing import Any

from ....cost.machine.units import size
from ....plurals import counted
from ...figures.process_groups import Collective, Group
from ...figures.sharded_blocks import (
    BACKWARD_GATHER,
    FORWARD_GATHER,
    GATHERS,
    REDUCTION,
    TENSOR,
    describe_blocks,
    exposed_s,
)
from ..descriptions import COMMUNICATION, CauseKind, Indicator
from ..evidence import Evidence, NamedCause

MIN_CALLS = 0.5  # of a kind of collective: then that collective belongs to the blocks
MAX_LISTED_BLOCKS = 8
MAX_LISTED_LAYERS = 8
_KINDS_OF = {
    "all-gather": GATHERS,
    "reduce-scatter": (REDUCTION,),
    "all-reduce": (REDUCTION,),  # between the replicas of shards
}


def sharded_exchange(e: Evidence, calls: Collective, figures: dict[str, Any]) -> NamedCause | None:
    """Return the cause if most calls of the costliest collective belong to sharded blocks.

    figures: Those of the collective, which the evidence has as well.
    """
    kinds = _KINDS_OF.get(calls.name)
    if e.sharded is None or kinds is None:
        return None
    blocks = e.sharded.blocks
    of_blocks = sum(one.count for block in blocks for one in block.calls if one.kind in kinds)
    if of_blocks < MIN_CALLS * calls.count / e.steps:
        return None
    most_exposed = sorted(blocks, key=lambda block: -block.exposed_s())[:MAX_LISTED_BLOCKS]
    found = {
        "forward_gathers_s": exposed_s(blocks, FORWARD_GATHER),
        "backward_gathers_s": exposed_s(blocks, BACKWARD_GATHER),
        "reductions_s": exposed_s(blocks, REDUCTION),
        "gathered_bytes": e.sharded.gathered_bytes,
        "free_bytes": e.sharded.free_bytes,
        "blocks": [
            {"name": block.name, "exposed_s": block.exposed_s()}
            | {f"{one.kind.replace(' ', '_')}_late_s": one.late_s for one in block.calls}
            for block in most_exposed
        ],
    }
    return "sharded-exchange", describe_blocks(blocks), figures | found


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
    listed = [{"name": layer.name, "exposed_s": layer.exposed_s()} for layer in layers]
    found = {"extent": group.size, "hosts": hosts, "layers": listed}
    return "tensor-exchange", sentence, figures | found


def bubble(e: Evidence) -> NamedCause | None:
    """Return the cause if stages wait for each other, with the stage that computes longest."""
    found = e.report.pipeline if e.loss_share("bubble") else None
    if found is None:
        return None
    uneven = f", and stage {found.slowest} computes longest" if found.slowest is not None else ""
    sentence = (
        f"the stages of the pipeline wait for each other for {found.bubble:.0%} of their time, "
        f"{found.formula:.0%} by the formula of {found.schedule} with {found.stages} stages and "
        f"{found.micro_batches} micro-batches{uneven}"
    )
    return "pipeline-bubble", sentence, asdict(found)


# Descriptions

CAUSES = (
    CauseKind(
        "sharded-exchange",
        COMMUNICATION,
        "gathers and reductions of sharded blocks",
        "most calls of the costliest collective gather or reduce blocks of a sharded model "
        "(FSDP2), with the blocks whose gathers and reductions are exposed most, and the gather "
        "that comes latest",
    ),
    CauseKind(
        "tensor-exchange",
        COMMUNICATION,
        "exchange of activations on the tensor axis",
        "the process group with most communication time is one of the tensor axis of a layout: its"
        " ranks exchange activations in each divided layer, by line of the script, and on how many"
        " nodes",
    ),
    CauseKind(
        "pipeline-bubble",
        COMMUNICATION,
        "waits of the stages of a pipeline for each other",
        "the stages of a [pipeline](../explanation/pipelines.md) wait for each other, with the "
        "share by the formula, and the stage that computes longest",
    ),
)

INDICATORS = (
    Indicator(
        "bubble",
        "bubble of the pipeline",
        "Time in which stages of a pipeline wait for each other. Only the record measures it.",
        bubble,
        lambda e: e.loss_share("bubble", doing=("bubble",)),
    ),
)
