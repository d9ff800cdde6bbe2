"""The verdict of a recorded run: the largest loss, its evidence, and what to do next."""

from dataclasses import asdict, dataclass
from typing import Any

from ..analyze.diagnosis.evidence import MIN_SHARE
from ..analyze.figures.losses import Loss
from ..analyze.figures.memory import MemoryGrowth
from ..analyze.figures.report import Report
from ..analyze.figures.stalls import STILL
from .figure_names import state_name
from .numbers import counted, duration, percent
from .sentences import doing, first_end, memory_sentence, pipeline_remedy, place, sentence
from .verdict import Verdict, begin_sentence, diagnose_command, in_doubt, rank_options, with_comment

MIN_CONFIDENCE = 0.8  # below it, a verdict is uncertain
MIN_MEASURED_STEPS = 10

# What takes the time, by kind of a loss or by what a late rank did longer.
_LOST_TO = {
    "input": "waiting for the next batch",
    "checkpoint": "checkpoints",
    "validation": "validation",
    "other": "other work of the script",
    "starved": "waiting for a core",
    "bubble": "waiting for other stages of the pipeline",
}
# What to change in the line of the script that a loss was seen in.
_EDITS = {
    "checkpoint": "save less often, or with torch.distributed.checkpoint.async_save",
    "validation": "evaluate less often, or on all ranks with a part of the samples each",
    "other": "do this work less often, or outside of the step",
}


@dataclass(frozen=True)
class _Topic:
    """Losses with one remedy: the time in it, and the waits of other ranks for it."""

    key: str  # a key of _LOST_TO, "communication", STILL, or "rank"
    losses: list[Loss]

    @property
    def share(self) -> float:
        return sum(loss.share for loss in self.losses)


def verdict_of_run(report: Report) -> Verdict:
    """Return what limits a run, according to its record.

    Memory that ends the job within a day comes first, whatever the losses are.
    """
    options = rank_options(report.hosts, report.size)
    options += [word for value in report.env for word in ("--env", value)]
    command = diagnose_command(options, report.command)
    if grown := first_end(report):
        return verdict_of_growth(grown, command)
    if report.window_s is None or report.efficiencies is None:
        return _without_steps(report)
    topics = _topics(report)
    doubt = _doubt(report)
    useful = f"{percent(report.efficiencies.useful)} of the ranks' time is useful"
    if not topics or topics[0].share < MIN_SHARE:
        why = "no loss was measured"
        if topics:
            largest = max(topics[0].losses, key=lambda loss: loss.share)
            why = f"the largest loss is {percent(topics[0].share)}: {sentence(largest, report)}"
        verdict = f"No loss takes {100 * MIN_SHARE:.0f} % of the ranks' time or more: {useful}."
        experiment = "measures what a record cannot show: whether the computation is slow"
        action = with_comment(command, experiment)
        return Verdict(in_doubt(verdict, doubt), begin_sentence(why), action)
    topic = topics[0]
    largest = max(topic.losses, key=lambda loss: loss.share)
    verdict = f"{percent(topic.share)} of the ranks' time is lost to {_lost_to(topic, report)}"
    verdict += f"{_sum_by_state(topic, report)}."
    why = begin_sentence(sentence(largest, report))
    if len(topic.losses) > 1:
        why = f"The largest part, {percent(largest.share)}: {sentence(largest, report)}"
    return Verdict(in_doubt(verdict, doubt), why, _next(topic, report, command))


def verdict_of_growth(grown: list[MemoryGrowth], command: str) -> Verdict:
    """Return the verdict on memory that ends the job; command: What to run next."""
    hours = min(growth.hours_left for growth in grown if growth.hours_left is not None)
    left = duration(3600 * hours)
    verdict = f"The {grown[0].kind} memory grows, and ends the job in about {left}."
    why = begin_sentence(memory_sentence(grown))
    return Verdict(verdict, why, with_comment(command, _WHAT_GROWS))


def run_json(report: Report, guard: dict[str, Any] | None = None) -> str:
    """Return the report as JSON text, with its verdict."""
    return report.to_json(verdict=asdict(verdict_of_run(report)), guard=guard)


def _topics(report: Report) -> list[_Topic]:
    """Return the losses by what has to change, the largest sum first."""
    found: dict[tuple[str, int | None], list[Loss]] = {}
    for loss in report.losses:
        key, rank = loss.kind, None
        if loss.kind == "wait":
            key = doing(loss, report) if loss.rank is not None else "communication"
        if key in ("useful", STILL):
            rank = loss.rank
        key = {"useful": "rank", "wait": "communication", "transfer": "communication"}.get(key, key)
        found.setdefault((key, rank), []).append(loss)
    topics = [_Topic(key, losses) for (key, _), losses in found.items()]
    return sorted(topics, key=lambda topic: -topic.share)


def _sum_by_state(topic: _Topic, report: Report) -> str:
    """Return the sum of a topic's share, by the states in the table; empty for one state."""
    shares: dict[str, float] = {}
    for loss in topic.losses:
        shares[loss.kind] = shares.get(loss.kind, 0.0) + loss.share
    if len(shares) < 2:
        return ""
    ordered = sorted(shares.items(), key=lambda entry: -entry[1])
    parts = (f"{state_name(report, kind)} {percent(share)}" for kind, share in ordered)
    return f" ({' + '.join(parts)})"


def _lost_to(topic: _Topic, report: Report) -> str:
    """Return a noun phrase that continues "is lost to"."""
    if topic.key in ("rank", STILL):
        does = "stood still" if topic.key == STILL else "computes longer"
        rank = topic.losses[0].rank
        assert rank is not None
        return f"waiting for {report.named([rank])}, which {does}"
    return _LOST_TO.get(topic.key, topic.key)


def _next(topic: _Topic, report: Report, command: str) -> str:
    if topic.key == STILL:
        host = topic.losses[0].host
        return f"read the system log of {host}: signals, pauses and swapping stop a process"
    if topic.key == "bubble" and report.pipeline and (remedy := pipeline_remedy(report.pipeline)):
        return remedy
    line = next((loss.lines[0] for loss in topic.losses if loss.lines), None)
    if topic.key in _EDITS and line is not None:
        return f"edit {place(line)} ({line['code']}): {_EDITS[topic.key]}"
    return command


def _doubt(report: Report) -> str:
    """Return why the figures are uncertain; empty if they are not."""
    times = report.step_times
    steps = times.last - times.first + 1 if times is not None else report.steps - 1
    if steps < MIN_MEASURED_STEPS:
        return f"only {counted(steps, 'measured step')}"
    if report.confidence < MIN_CONFIDENCE:
        return f"confidence {report.confidence:.2f}"
    return ""


def _without_steps(report: Report) -> Verdict:
    """Return why a run has no measured steps, and what to do."""
    steps = "No optimizer step was" if report.steps == 0 else "Fewer than two steps were"
    verdict = f"{steps} recorded: too few to measure where the time went."
    failed = next((doubt for doubt in report.doubts if " failed" in doubt), None)
    if failed is not None:
        correct = "correct this error, and run the script again"
        return Verdict(verdict, begin_sentence(failed), correct)
    if report.missing_ranks or report.lost_events:
        return Verdict(verdict, begin_sentence(report.doubts[0]), _AGAIN)
    if report.steps:
        why = f"the script made {counted(report.steps, 'step')}, and the first one is warm-up"
        return Verdict(verdict, begin_sentence(why), "let the script train for 20 steps or more")
    why = (
        "no rank called step() of a torch optimizer or model.fit of Keras, or the script ended "
        "before its first step"
    )
    return Verdict(verdict, begin_sentence(why), _COUNTED_STEPS)


_WHAT_GROWS = (
    "names containers that keep tensors of each step (losses.append(loss) keeps graphs: append "
    "loss.item())"
)
_AGAIN = "record the run again: paceline run --record FOLDER SCRIPT"
_COUNTED_STEPS = (
    "train with a torch.optim optimizer or model.fit of Keras, or report each step: a loop over "
    "world.epochs and world.batches"
)
