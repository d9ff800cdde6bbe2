"""Rule for the bubble of a pipeline: time in which its stages wait for each other."""

from dataclasses import asdict

from ..evidence import Evidence, NamedCause


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
