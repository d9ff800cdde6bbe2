"""Sentences about the pipeline of a run, for the terminal, the page and the verdict."""

from ..analyze.figures.pipeline import PipelineFigures
from ..analyze.figures.report import Report
from .numbers import counted, duration, percent

MIN_FORMULA = 0.1  # of the stages' time, from which on more micro-batches are proposed


def pipeline_sentences(report: Report) -> list[str]:
    """Return the bubble beside its formula, and the stage that the others wait for."""
    one = report.pipeline
    if one is None:
        return []
    batches = counted(one.micro_batches, "micro-batch", "micro-batches")
    lines = [
        f"Pipeline ({one.schedule}, {counted(one.stages, 'stage')}, {batches}): the bubble takes "
        f"{percent(one.bubble)} of the stages' time, {percent(one.formula)} by the formula"
    ]
    each = ", ".join(duration(seconds) for seconds in one.stage_s)
    line = f"Stages compute {each} in a step"
    if one.slowest is not None:
        line += f": the others wait for stage {one.slowest}"
    if remedy := pipeline_remedy(one):
        line += f". HINT: {remedy}"
    return [*lines, line]


def pipeline_remedy(one: PipelineFigures) -> str:
    """Return what makes the bubble smaller; "" if nothing is known."""
    if one.balance:
        return f"balance={one.balance!r} of world.distribute, which moves blocks between stages"
    if one.formula >= MIN_FORMULA:
        return f"micro-batches={2 * one.micro_batches} in the layout, if batches have the samples"
    return ""
