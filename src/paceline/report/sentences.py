"""Sentences about a run: losses, standstills, stalls and outlier steps, waits for cores, memory,
pipelines, the gradient noise scale, and the FLOPs of a step.

The sentence of a loss says what it is, on which rank, in which steps and in which collective.
"""

from pathlib import Path

import numpy as np

from ..analyze.figures.losses import Loss
from ..analyze.figures.memory import HOST, MemoryGrowth
from ..analyze.figures.noise_scale import NoiseScale
from ..analyze.figures.pipeline import PipelineFigures
from ..analyze.figures.report import Report
from ..analyze.figures.stalls import STALLED, STILL, Stall, Standstill
from ..analyze.figures.step_work import Roofline
from ..analyze.figures.steps import Outlier
from ..analyze.figures.window_steps import Occurrence
from ..cost.machine.units import format_value, join_words
from ..cost.roofline import RooflinePoint
from ..plurals import named_ranks, parse_ranges
from .numbers import amount, counted, duration, of_group, ordinal, percent, size
from .verdict import capitalized

LATE_BECAUSE = {
    "useful": "computed longer",
    "input": "had waited for its batch",
    "checkpoint": "had saved a checkpoint",
    "validation": "had evaluated the model",
    "starved": "had waited for a core",
    "other": "had done other work of the script",
    "bubble": "had waited for another stage of its pipeline",
    "wait": "had waited for another rank",
    "transfer": "was late after its previous collective",
    STILL: "had stood still",
}

_DID_LONGER = {
    "useful": "computed",
    "input": "waited for a batch",
    "checkpoint": "saved",
    "validation": "evaluated",
    "starved": "waited for a core",
    "other": "did other work of the script",
    "bubble": "waited for another stage of its pipeline",
    "transfer": "exchanged data",
    STILL: "stood still",
}
_STARVED_WHILE = {
    "useful": ", mostly while it computed",
    "input": ", mostly while it waited for or loaded batches",
    "checkpoint": ", mostly while it saved checkpoints",
    "validation": ", mostly while it evaluated the model",
    "other": ", mostly during other work of the script",
}
MAX_TROUBLES = 3  # standstills and stalls with a sentence each; the others are counted
MAX_NAMED_STEPS = 8
# A standstill in one of them may be due to the line of the script that ran.
_STATES_OF_SCRIPT = ("input", "checkpoint", "validation", "other")
_MIN_NEARLY_ALL = 0.9  # of the steps, or of a loss
_MIN_WAIT_S = 0.1  # a shorter wait for a rank that stood still is not mentioned


def sentence(loss: Loss, report: Report) -> str:
    """Explain a loss to a reader who knows the script but not Paceline."""
    if loss.kind == "wait" and loss.rank is None:
        return "short waits that no single rank caused."
    if loss.kind == "wait":
        late_because = LATE_BECAUSE[doing(loss, report)]
        return (
            f"waiting for {_rank_in_words(loss, report)}, which {late_because}; mostly in "
            f"{_collective_in_words(loss)}{_steps_in_words(loss, report)}."
        )
    if loss.kind == "transfer":
        ending = "" if report.clocks_aligned else " (waits included)"
        when = f"after the last rank had arrived{ending}{_steps_in_words(loss, report)}"
        return f"{_collective_in_words(loss)} itself, {when}."
    what = {
        "input": "waiting for the next batch",
        "checkpoint": "waiting for checkpoints",
        "validation": "evaluating",
        "starved": f"waiting for a core{_STARVED_WHILE.get(str(loss.doing), '')}",
        "other": "other work of the script, outside of the recognised phases",
        "bubble": "waiting for other stages of the pipeline",
    }[loss.kind]
    most = ""
    if len(report.ranks) > 1 and loss.most is not None:
        most = f"; most on {_rank_in_words(loss, report)}: {100 * loss.most:.1f} % of its time"
    return f"{what}{most}{_steps_in_words(loss, report)}.{_source_line(loss)}"


def doing(loss: Loss, report: Report) -> str:
    """Return the state in which the late rank of a wait spent more time than the others.

    It is STILL if standstills of that rank explain at least half of the wait.
    """
    stills = [still for still in report.stood_still if loss.rank in still.ranks and still.waited_s]
    waited_s = sum(still.waited_s or 0.0 for still in stills)
    other_ranks = len(report.ranks) - max((len(still.ranks) for still in stills), default=0)
    whole_wait_s = loss.share * (report.window_s or 0.0) * len(report.ranks)
    return STILL if stills and waited_s * other_ranks >= 0.5 * whole_wait_s else str(loss.doing)


def _rank_in_words(loss: Loss, report: Report) -> str:
    several = len(set(report.hosts)) > 1
    assert loss.rank is not None
    return report.named([loss.rank], host=str(loss.host) if several else "")


def _collective_in_words(loss: Loss) -> str:
    return f"{loss.collective}{of_group(loss.group)}"


def _steps_in_words(loss: Loss, report: Report) -> str:
    if loss.steps is None or not report.ranges:
        return ""
    if loss.occurs is not None:
        share = loss.occurs.share
        most = f"{100 * share:.0f} % of it " if share < _MIN_NEARLY_ALL else ""
        return f", {most}{occurs_in_words(loss.occurs)}"
    first, last = loss.steps
    return f", in step {first}" if first == last else f", in steps {first} to {last}"


def occurs_in_words(occurs: Occurrence) -> str:
    """Say in which steps a loss occurs: "in all steps", "in every 30th step", "in step 7"."""
    if occurs.count == occurs.of:
        return "in all steps"
    if occurs.count == 1 and occurs.first > occurs.last_of_all:
        return "after the last step"
    if occurs.count >= _MIN_NEARLY_ALL * occurs.of:
        return f"in nearly all steps ({occurs.count} of {occurs.of})"
    named = _steps_of(occurs)
    if occurs.at_epoch_ends:
        return f"at the {'end of an epoch' if occurs.count == 1 else 'ends of epochs'} ({named})"
    return f"in {named}"


def _steps_of(occurs: Occurrence) -> str:
    """Name some of the steps: their period, their range, their numbers, or how many they are."""
    span = occurs.last - occurs.first + 1
    if occurs.period is not None:
        about = "" if occurs.exact else "about "
        return f"{about}every {ordinal(occurs.period)} step, from {occurs.first} to {occurs.last}"
    if occurs.count == 1:
        return f"step {occurs.first}"
    if occurs.count == span or (
        occurs.count > MAX_NAMED_STEPS and occurs.count >= _MIN_NEARLY_ALL * span
    ):
        return f"steps {occurs.first} to {occurs.last}"
    if occurs.count <= MAX_NAMED_STEPS:
        *before, last = occurs.steps
        return f"steps {', '.join(map(str, before))} and {last}"
    between = (
        f", from {occurs.first} to {occurs.last}" if span < _MIN_NEARLY_ALL * occurs.of else ""
    )
    return f"{occurs.count} of {occurs.of} steps{between}"


def _source_line(loss: Loss) -> str:
    if not loss.lines:
        return ""
    line = loss.lines[0]
    inside = f" (in {line['inside']})" if line.get("inside") else ""
    return f" Seen at {place(line)}{inside}  {line['code']}"


def place(line: dict[str, object]) -> str:
    """Return the file name and number of a line of the script: "train.py:12"."""
    return f"{Path(str(line['file'])).name}:{line['line']}"


def troubles(report: Report) -> list[str]:
    """Explain each standstill and stall, the longest first; count those beyond MAX_TROUBLES."""
    troubles: list[Standstill | Stall] = [*report.stood_still, *report.stalled]
    troubles.sort(key=lambda trouble: -trouble.seconds)
    lines = [
        _stall_sentence(halt) if isinstance(halt, Stall) else _standstill_sentence(halt, report)
        for halt in troubles[:MAX_TROUBLES]
    ]
    more = troubles[MAX_TROUBLES:]
    if more:
        stalls = sum(isinstance(trouble, Stall) for trouble in more)
        kinds = [
            counted(count, f"more {what}")
            for count, what in ((len(more) - stalls, "standstill"), (stalls, "stall"))
            if count
        ]
        longest = duration(more[0].seconds)
        lines.append(f"And {' and '.join(kinds)}, the longest of {longest} (--json)")
    return lines


def _standstill_sentence(standstill: Standstill, report: Report) -> str:
    several = len(set(report.hosts)) > 1
    ranks = report.named(standstill.ranks)
    who = capitalized(report.named(standstill.ranks, host=standstill.host if several else ""))
    evidence = f"none of {'its' if len(standstill.ranks) == 1 else 'their'} threads ran"
    as_when = "a process is stopped or swapped out"
    if standstill.whole:
        who, evidence = standstill.host, f"no thread of its ranks ran ({ranks})"
        as_when = "a node or a whole job is paused"
    if standstill.line is not None and standstill.state in _STATES_OF_SCRIPT:
        called = f"{place(standstill.line)} ({standstill.line['code']})"
        as_when = f"{called} calls C code that holds the interpreter lock (GIL), or {as_when}"
    waited = ""
    if standstill.waited_s is not None and standstill.waited_s >= _MIN_WAIT_S:
        whom = "it" if standstill.whole or len(standstill.ranks) == 1 else "them"
        waited = f"; others waited {duration(standstill.waited_s)} for {whom}"
    length = f"{duration(standstill.seconds)} in step {standstill.step}"
    return f"{who} stood still for {length}: {evidence}, as when {as_when}{waited}"


def _stall_sentence(stall: Stall) -> str:
    number = "" if stall.number is None else f" {stall.number}"
    took = f"{capitalized(stall.collective)}{number}{of_group(stall.group)} took"
    although = f"although all its ranks had arrived (usual: {duration(stall.usual_s)})"
    culprit = "network" if stall.hosts > 1 else "collective itself"
    took += f" {duration(stall.seconds)} in step {stall.step}"
    return f"{took} {although}: the {culprit} stalled"


def outliers(report: Report) -> list[str]:
    """Explain outlier steps, one sentence for each cause, the most costly cause first.

    Standstills and stalls are left out, because ``troubles`` explains them.
    """
    found = report.step_times
    if found is None:
        return []
    causes: dict[tuple[str | None, int | None], list[Outlier]] = {}
    for outlier in found.outliers:
        if outlier.state in (STILL, STALLED):
            continue
        causes.setdefault((outlier.state, outlier.rank), []).append(outlier)
    order = sorted(causes.values(), key=lambda ones: -sum(o.longer_s for o in ones))
    return [_outliers_sentence(ones, report) for ones in order]


def _outliers_sentence(ones: list[Outlier], report: Report) -> str:
    steps = [outlier.step for outlier in ones]
    longer = duration(float(np.median([outlier.longer_s for outlier in ones])))
    about = "about " if len(ones) > 1 else ""
    return f"{_steps_named(steps)}: {cause(ones[0], report)}, {about}{longer} longer than usual"


def cause(outlier: Outlier, report: Report) -> str:
    """Say which rank did what longer than usual in an outlier step."""
    if outlier.state is None:
        return "no rank and no state explains it alone"
    if outlier.state == STALLED:
        return "a collective stalled"
    who = "the ranks" if outlier.rank is None else report.named([outlier.rank])
    return f"{who} {_DID_LONGER.get(outlier.state, outlier.state)}"


def _steps_named(steps: list[int]) -> str:
    """Name the steps, with their period if they are periodic."""
    if len(steps) == 1:
        return f"Step {steps[0]}"
    gaps = np.unique(np.diff(steps))
    if len(steps) > 3 and len(gaps) == 1 and gaps[0] > 1:
        period = ordinal(int(gaps[0]))
        return f"{len(steps)} steps, every {period} from {steps[0]} to {steps[-1]}"
    named, more = ", ".join(map(str, steps[:MAX_NAMED_STEPS])), len(steps) - MAX_NAMED_STEPS
    return f"Steps {named}" + (f" and {more} more" if more > 0 else "")


def noise_scale_text(found: NoiseScale) -> str:
    """Return the noise scale with its interval."""
    of = f"from {counted(found.steps, 'sampled step')}"
    if found.samples is None:
        return (
            f"gradient noise scale: undetermined {of}, because the gradient is not above its noise"
        )
    high = "no upper limit" if found.high is None else amount(found.high)
    return (
        f"gradient noise scale {amount(found.samples)} samples (95 %: {amount(found.low)} to "
        f"{high}; {of})"
    )


def noise_scale_sentence(found: NoiseScale) -> str:
    """Return the noise scale with its interval, and what it says of a larger batch."""
    text = capitalized(noise_scale_text(found))
    if found.samples is None:
        return f"{text}; larger batches probably still help"
    twice = found.steps_with(2 * found.global_batch)
    return (
        f"{text}: twice the global batch of {amount(found.global_batch)} would need {twice:.2f} of "
        "the steps to the same loss"
    )


MIN_FORMULA = 0.1  # of the stages' time, from which on more micro-batches are proposed


def pipeline_sentences(report: Report) -> list[str]:
    """Return the bubble beside its formula, and the stage that the others wait for."""
    figures = report.pipeline
    if figures is None:
        return []
    batches = counted(figures.micro_batches, "micro-batch", "micro-batches")
    lines = [
        f"Pipeline ({figures.schedule}, {counted(figures.stages, 'stage')}, {batches}): the bubble "
        f"takes {percent(figures.bubble)} of the stages' time, {percent(figures.formula)} by the "
        "formula"
    ]
    each = ", ".join(duration(seconds) for seconds in figures.stage_s)
    line = f"Stages compute {each} in a step"
    if figures.slowest is not None:
        line += f": the others wait for stage {figures.slowest}"
    if remedy := pipeline_remedy(figures):
        line += f". HINT: {remedy}"
    return [*lines, line]


def pipeline_remedy(figures: PipelineFigures) -> str:
    """Return what makes the bubble smaller; "" if nothing is known."""
    if figures.balance:
        return f"balance={figures.balance!r} of world.distribute, which moves blocks between stages"
    if figures.formula >= MIN_FORMULA:
        return (
            f"micro-batches={2 * figures.micro_batches} in the layout, if batches have the samples"
        )
    return ""


MIN_STARVED = 0.02  # of a rank's time; less is not mentioned
MIN_WAITING = 0.5  # other threads of a rank that wait on average; fewer are not mentioned
MIN_BUSY = 0.5  # threads; fewer are not mentioned


def core_wait_sentence(report: Report) -> str:
    """Return which threads share how many cores on the node where ranks wait most for a core.

    Without full stop; empty if no rank waits for a core to speak of.
    """
    waits = [
        (rank["starved"], threads.threads_waiting + threads.worker_threads_waiting)
        for rank, threads in zip(report.states, report.other_threads, strict=False)
    ]
    if not any(own >= MIN_STARVED or others >= MIN_WAITING for own, others in waits):
        return ""
    host = report.hosts[waits.index(max(waits, key=sum))]
    here = [i for i, name in enumerate(report.hosts) if name == host]
    starved = sum(waits[i][0] for i in here) / len(here)
    others = sum(waits[i][1] for i in here)
    sentence = f"{_threads_on(report, host, here)}: "
    thread, waits_for = ("thread", "waits") if len(here) == 1 else ("threads", "wait")
    sentence += f"the training {thread} {waits_for} for a core {percent(starved)} of the time"
    if others >= MIN_WAITING:
        number = counted(round(others, 1), "other thread")
        wait = "waits" if number.startswith("1 ") else "wait"
        sentence += f", and on average {number} {wait} for one"
    return sentence


def _threads_on(report: Report, host: str, here: list[int]) -> str:
    """Return the threads of a node's ranks, and the cores that they share."""
    places = [place for place in report.places if place.host == host]
    cores = {core for place in places for core in parse_ranges(place.cores or "")}
    threads = max((place.threads or 0 for place in places), default=0)
    each = " each" if len(here) > 1 else ""
    text = counted(len(here), "rank")
    text += f" with {counted(threads, 'thread')} of PyTorch{each}" if threads else ""
    workers = sum(report.other_threads[i].worker_threads for i in here)
    if workers >= MIN_BUSY:
        text += f" and {counted(round(workers, 1), 'busy thread')} of their child processes"
    where = f" on {host}" if len(set(report.hosts)) > 1 else ""
    does = "uses" if len(here) == 1 and workers < MIN_BUSY else "share"
    return f"{text} {does} {counted(len(cores), 'core')}{where}" if cores else f"{text}{where}"


MAX_WARNINGS = 3


def memory_warnings(report: Report) -> list[str]:
    """Return a sentence for each growth that is warned about: by kind of memory and node."""
    groups: dict[tuple[str, str], list[MemoryGrowth]] = {}
    for growth in report.memory:
        if growth.warned:
            groups.setdefault((growth.kind, growth.host), []).append(growth)
    return [capitalized(memory_sentence(group)) for group in [*groups.values()][:MAX_WARNINGS]]


def peak_sentence(report: Report) -> str:
    """Return the largest memory of a rank and its parts; "" without a model of the world."""
    if not report.peaks:
        return ""
    peak = report.peaks[0]
    names = ("parameters", "buffers", "gradients", "optimizer_states", "rest")
    parts = [f"{name.replace('_', ' ')} {size(n)}" for name in names if (n := getattr(peak, name))]
    of = f"rank {peak.rank} ({peak.host})" if report.size > 1 else "the rank"
    host = f"; {size(peak.offloaded)} offloaded to the host" if peak.offloaded else ""
    predicted = f"; predicted: {size(peak.predicted)}" if peak.predicted is not None else ""
    return (
        f"Largest {peak.kind} memory, of {of} with layout {peak.layout}: {size(peak.bytes)} "
        f"({', '.join(parts)}){host}{predicted}"
    )


def first_end(report: Report) -> list[MemoryGrowth]:
    """Return the growth that ends the job first, of all ranks that share this memory; or none."""
    first = next((growth for growth in report.memory if growth.ends_job), None)
    if first is None:
        return []
    same = (first.kind, first.host)
    return [growth for growth in report.memory if (growth.kind, growth.host) == same]


def memory_sentence(group: list[MemoryGrowth]) -> str:
    """Return how fast the memory of these ranks grows, and when it ends the job; no full stop."""
    most = max(group, key=lambda growth: growth.rate)
    ranks = named_ranks(sorted({growth.rank for growth in group}))
    grows = "grows by" if len(group) == 1 else "grows by at most"
    text = f"the {most.kind} memory of {ranks} ({most.host}) {grows} {_rate(most)}"
    hours = min(
        (growth.hours_left for growth in group if growth.hours_left is not None), default=None
    )
    if hours is None:
        return text
    left = "the node" if most.kind == HOST else "the device"
    return f"{text}: {left} has none left in {duration(3600 * hours)} if this continues"


def _rate(growth: MemoryGrowth) -> str:
    low, high = (size(3600 * max(x, 0.0)) for x in (growth.low, growth.high))
    each = f", {size(growth.per_step)} per step" if growth.per_step else ""
    return f"{size(3600 * growth.rate)} per hour ({low} to {high}){each}"


MEASURED_ALIKE = 1.1  # factor by which two measurements of one rate may differ


def work_sentences(report: Report) -> list[str]:
    """Return the sentences, without full stops; empty if the FLOPs of no step were counted."""
    work = report.work
    if work is None:
        return []
    if not work.flops:
        return [f"Step {work.step} was counted, and has no operator whose FLOPs are known"]
    found = [
        f"A step computes {format_value(work.flops, 'FLOP')} ({work.precision}) and moves "
        f"{format_value(work.bytes, 'B')} through memory, {work.flops / work.bytes:.3g} FLOP/byte: "
        f"counted on {counted(len(work.ranks), 'rank')} in step {work.step}, which the "
        "counting made slower"
    ]
    if work.uncounted:
        found.append(f"Operators with unknown FLOPs: {join_words(work.uncounted)}")
    line = report.roofline
    if line is None:
        return found
    whole = line.points.get("a step")
    if whole is not None:
        found.append(f"A step reaches {reaches(whole)} on {line.host} ({line.device})")
    found += _above(line)
    if line.assumed:
        found.append(
            f"paceline check has not measured {report.hosts[0]}: the roofline is that "
            f"of {line.host}"
        )
    return found


def _above(line: Roofline) -> list[str]:
    """Explain points that lie above their roof."""
    above = {p.bound: name for name, p in line.points.items() if p.share > MEASURED_ALIKE}
    found = []
    if "compute" in above:
        found.append(
            f"{above['compute']} is above the roof: other processes slowed paceline check down. "
            "HINT: repeat paceline check while no other process runs"
        )
    if "memory" in above:
        found.append(
            f"{above['memory']} is above the memory roof: part of its memory traffic came from "
            "caches"
        )
    return found


def reaches(placed: RooflinePoint) -> str:
    """Return the rate of a point, and its share of the attainable rate, in words."""
    by = "arithmetic" if placed.bound == "compute" else "memory bandwidth"
    return f"{format_value(placed.rate, 'FLOP/s')}, {percent(placed.share)} of what {by} allows"
