"""Rules for work inside the model: operators that a step may not need, or that are slow.

The share of a finding is an upper bound of what its remedy can save. Shares of different findings
overlap.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..descriptions import MODEL, CauseKind
from ..evidence import MIN_SHARE
from ..operator_profile import OperatorProfile, ProfiledOperator
from .lines import mostly_in

MIN_SMALL_CALLS = 32  # of an operator per step, in one line and module: fewer are not a loop
MIN_FLOAT64_SHARE = 0.5  # of the parameters' bytes: then the rule "precision" applies
SLOW_ROOFLINE_SHARE = 0.2  # of the attainable FLOP/s
SLOW_BANDWIDTH_SHARE = 0.01  # of the memory bandwidth; exp and tanh on CPUs reach more
# The best product of the step is the reference, at least this share of the attainable FLOP/s: on a
# machine that is not quiet all operators stay below its limits.
MIN_REFERENCE = 0.5
MIN_SLOW_CALL = 50  # duration of a slow call, relative to an operator on one element
MIN_GROWTH = 8  # bytes of a large output over bytes of the inputs
MIN_LARGE_BYTES = 8 << 20
MAX_MEMORY_SHARE = 0.1  # of the device's memory, divided by the ranks
MAX_LINES = 5  # of a finding
MAX_PRODUCTS = 4


@dataclass(frozen=True)
class Finding:
    """Something inside the model that may be avoided.

    Attributes:
        id: Id of the cause.
        share: Upper bound of the gain, as a share of a step's time.
        remedy: What to change.
        lines: Lines of the script, those with the largest share first.
    """

    id: str
    share: float
    sentence: str
    remedy: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)


Seconds = Callable[[ProfiledOperator], float]


@dataclass(frozen=True)
class _Avoidable:
    """Calls that a step does not need: the operators with ``seconds`` of them."""

    id: str
    seconds: Seconds
    sentence: str
    remedy: str

    def find(self, profile: OperatorProfile) -> Finding:
        chosen = [op for op in profile.operators if self.seconds(op)]
        return _finding(self.id, profile, chosen, self.seconds, self.sentence, self.remedy)


def _of_phase(phase: str) -> Seconds:
    """Return a function for the time of operators of a phase."""
    return lambda one: one.row.seconds if one.row.phase == phase else 0.0


_AVOIDABLE = (
    _Avoidable(
        "recomputation",
        lambda one: one.row.repeated_s,
        "operators are computed again on the same values in the same step",
        "keep the first result in a variable, and use it again",
    ),
    _Avoidable(
        "activation-checkpointing",
        _of_phase("recomputation"),
        "activation checkpointing computes parts of the forward again in the backward",
        "checkpoint fewer modules, as far as the memory allows",
    ),
    _Avoidable(
        "unused-output",
        lambda one: one.row.unused_s,
        "the forward computes outputs that neither a loss nor another operator uses",
        "do not call these modules, or add their output to the loss",
    ),
    _Avoidable(
        "unneeded-gradient",
        lambda one: one.row.unneeded_s,
        "the backward computes gradients of parameters that no optimizer updates",
        "set requires_grad_(False) on these parameters, or add them to the optimizer",
    ),
    _Avoidable(
        "second-backward",
        _of_phase("second backward"),
        "gradients of the same operators are computed in more than one backward",
        "read .grad after the one backward, or add the losses and call backward once",
    ),
)


def findings(profile: OperatorProfile) -> list[Finding]:
    """Return what takes at least ``MIN_SHARE`` of a step, largest first."""
    rules = (
        *(_copies, _small_operators, *(avoidable.find for avoidable in _AVOIDABLE)),
        *(_float64, _slow_operators, _large_intermediate, _padding),
    )
    found = [finding for rule in rules if (finding := rule(profile)) is not None]
    return sorted(
        (finding for finding in found if finding.share >= MIN_SHARE),
        key=lambda finding: -finding.share,
    )


def products(profile: OperatorProfile) -> list[ProfiledOperator]:
    """Return the operators with FLOPs that take longest."""
    return [op for op in profile.operators if op.row.flops][:MAX_PRODUCTS]


def _by_line(
    profile: OperatorProfile, chosen: Iterable[ProfiledOperator], seconds: Seconds
) -> list[dict[str, Any]]:
    """Return the lines of operators with their shares, those with the largest share first."""
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    for op in chosen:
        line = lines.setdefault(
            op.place,
            {"file": op.file, "line": op.line, "code": op.code, "share": 0.0, "operators": []},
        )
        line["share"] += profile.share(seconds(op))
        if op.row.operator not in line["operators"]:
            line["operators"].append(op.row.operator)
    return sorted(lines.values(), key=lambda line: -line["share"])


def _finding(
    name: str,
    profile: OperatorProfile,
    chosen: Iterable[ProfiledOperator],
    seconds: Seconds,
    sentence: str,
    remedy: str,
    factor: float = 1.0,
    **evidence: Any,
) -> Finding:
    lines = _by_line(profile, chosen, seconds)
    share = factor * sum(line["share"] for line in lines)
    named = [line for line in lines if line["file"]]
    modules = list(dict.fromkeys(op.row.module for op in chosen if op.row.module))
    evidence = {"modules": modules[:MAX_LINES], "confirmed": False, **evidence}
    return Finding(name, share, sentence + mostly_in(named), remedy, lines[:MAX_LINES], evidence)


def _copies(profile: OperatorProfile) -> Finding | None:
    chosen = [
        op
        for op in profile.operators
        if op.row.copy in ("layout", "cast") and op.file and op.row.phase != "optimizer"
    ]
    casts = sum(op.row.seconds for op in chosen if op.row.copy == "cast")
    total = sum(op.row.seconds for op in chosen)
    kind = "dtypes" if casts > total / 2 else "memory layouts"
    sentence = f"tensors are copied between {kind}"
    remedy = (
        "compute in one dtype between the products"
        if kind == "dtypes"
        else "keep one order of dimensions, and let operators read the permuted view "
        "(no contiguous() or clone())"
    )
    return _finding("copies", profile, chosen, lambda one: one.row.seconds, sentence, remedy)


def _small_operators(profile: OperatorProfile) -> Finding | None:
    chosen = [op for op in profile.operators if op.file and op.row.small_calls >= MIN_SMALL_CALLS]
    count = sum(op.row.small_calls for op in chosen)
    sentence = (
        f"{count:,.0f} small operators per step take about as long as their dispatch "
        f"({1e6 * profile.dispatch_s:.2g} µs each)"
    )
    in_optimizer = sum(op.row.small_s for op in chosen if op.row.phase == "optimizer")
    most = in_optimizer > sum(op.row.small_s for op in chosen) / 2
    remedy = (
        "let the optimizer update all parameters at once (fused=True or foreach=True)"
        if most
        else "compute the iterations of the loop in one operator on a larger tensor, or use "
        "torch.compile"
    )
    return _finding(
        *("small-operators", profile, chosen, lambda one: one.row.small_s, sentence, remedy),
        calls=count,
    )


def _padding(profile: OperatorProfile) -> Finding | None:
    if any(op.row.operator == "_pack_padded_sequence" for op in profile.operators):
        return None  # recurrent layers then skip the padding
    chosen = [op for op in profile.operators if op.row.padded_s]
    whole = sum(op.row.seconds for op in chosen)
    padded = sum(op.row.padded_s for op in chosen) / whole if whole else 0.0
    sentence = f"{100 * padded:.0f} % of the model's input is padding"
    remedy = "pad each batch only to its longest sample, and put samples of similar length together"
    found = _finding("padding", profile, chosen, lambda one: one.row.padded_s, sentence, remedy)
    origins = [op for op in profile.operators if op.row.pads and op.file]
    if not origins:
        return replace(found, sentence=sentence)
    first = {"file": origins[0].file, "line": origins[0].line, "code": origins[0].code}
    lines = [{**first, "share": found.share, "operators": [origins[0].row.operator]}, *found.lines]
    made = f"{sentence}, made in line {first['line']}: {first['code']}"
    return replace(found, sentence=made, lines=lines[:MAX_LINES])


def _float64(profile: OperatorProfile) -> Finding | None:
    sizes = profile.parameter_bytes
    if sizes.get("float64", 0) > MIN_FLOAT64_SHARE * sum(sizes.values()):
        return None
    chosen = [op for op in profile.operators if op.row.float64_s]
    origins = [op for op in chosen if op.row.widens and op.row.phase == "forward" and op.file]
    first = f" (float64 begins in line {origins[0].line})" if origins else ""
    sentence = f"operators compute in float64, although the parameters do not{first}"
    remedy = "create these tensors as float32 (dtype=torch.float32), or convert them with .float()"
    # In float32 an operator moves half of the bytes.
    return _finding(
        *("precision", profile, chosen, lambda one: one.row.float64_s, sentence, remedy, 0.5),
        origins=[
            {"file": origin.file, "line": origin.line, "code": origin.code}
            for origin in origins[:3]
        ],
    )


def _slow_operators(profile: OperatorProfile) -> Finding | None:
    lost = {id(one): seconds for one, seconds in _lost_to_slow_kernels(profile)}
    chosen = [op for op in profile.operators if id(op) in lost]
    if not chosen:
        return None
    worst = max(chosen, key=lambda one: lost[id(one)])
    rate = (
        f"{100 * worst.of_roofline:.2g} % of the roofline"
        if worst.of_roofline is not None
        else f"{100 * _bandwidth_share(worst, profile):.2g} % of the memory bandwidth"
    )
    sentence = f"{worst.row.operator} of {worst.row.shapes} reaches {rate}"
    remedy = "use another operator, dtype or shape with a faster kernel on this device"
    return _finding("slow-operators", profile, chosen, lambda one: lost[id(one)], sentence, remedy)


def _lost_to_slow_kernels(profile: OperatorProfile) -> Iterator[tuple[ProfiledOperator, float]]:
    """Yield operators far below the limits of the device, and the seconds that they lose."""
    rates = [op.of_roofline for op in profile.operators if op.of_roofline is not None]
    reference = min(max([MIN_REFERENCE, *rates]), 1.0)
    for op in profile.operators:
        row = op.row
        if not row.calls or row.seconds / row.calls < MIN_SLOW_CALL * profile.dispatch_s:
            continue
        reached, least = op.of_roofline, SLOW_ROOFLINE_SHARE
        if reached is None:
            reached, least = _bandwidth_share(op, profile), SLOW_BANDWIDTH_SHARE
            if row.random or row.copy or not row.bytes:
                continue
        lost = row.seconds * (1 - reached / reference)
        if reached < least * reference and profile.share(lost) >= MIN_SHARE:
            yield op, lost


def _bandwidth_share(one: ProfiledOperator, profile: OperatorProfile) -> float:
    limit = one.row.seconds * profile.limits.bytes_per_s
    return one.row.bytes / limit if limit else 0.0


def _read_again(one: ProfiledOperator, modules: dict[str, float]) -> float:
    """Return the bytes of the large tensor of an operator's module; 0 if it cannot read one.

    Products and operators of other modules may have inputs of that size for other reasons.
    """
    return 0.0 if one.row.flops or one.row.phase == "optimizer" else modules.get(one.row.module, 0)


def _large_intermediate(profile: OperatorProfile) -> Finding | None:
    memory = profile.limits.memory_bytes
    memory = memory if profile.device != "cpu" else memory / profile.ranks
    sizes: dict[tuple[str, int], float] = {}
    for op in profile.operators:
        # A convolution or linear layer of few channels makes a larger output by definition.
        expands = op.row.growth >= MIN_GROWTH and (
            not (op.row.flops or op.row.random) or op.row.operator in ("bmm", "baddbmm")
        )
        size = op.row.output_bytes
        if op.file and ((expands and size >= MIN_LARGE_BYTES) or size >= MAX_MEMORY_SHARE * memory):
            sizes[op.place] = max(sizes.get(op.place, 0), size)
    modules: dict[str, float] = {}  # the largest of each module
    for op in profile.operators:
        if op.place in sizes:
            modules[op.row.module] = max(modules.get(op.row.module, 0), sizes[op.place])
    chosen = [
        op
        for op in profile.operators
        if op.row.calls
        and (size := sizes.get(op.place) or _read_again(op, modules))
        and op.row.bytes / op.row.calls >= size / 2
    ]
    largest = max(sizes.values(), default=0.0)
    sentence = f"intermediate tensors of up to {largest / 2**20:,.0f} MiB are written and read"
    remedy = (
        "use an operator that does not store the expanded tensor (a product, cdist, "
        "scaled_dot_product_attention, an index), or compute in parts"
    )
    return _finding(
        *("large-intermediate", profile, chosen, lambda one: one.row.seconds, sentence, remedy),
        bytes=largest,
    )


# Descriptions

CAUSES = (
    CauseKind(
        "copies",
        MODEL,
        "copies of tensors between memory layouts or dtypes",
        "tensors are copied between memory layouts (`contiguous`, `clone`) or dtypes (`to`), "
        "outside of the optimizer",
    ),
    CauseKind(
        "small-operators",
        MODEL,
        "many small operators",
        "an operator is called at least 32 times per step by one line in one module, and takes "
        "less than three times as long as its dispatch. Operators that a recurrent layer of "
        "PyTorch calls do not count",
    ),
    CauseKind(
        "recomputation",
        MODEL,
        "operators computed again on the same values",
        "an operator is called again on the same values in the same step",
    ),
    CauseKind(
        "activation-checkpointing",
        MODEL,
        "activation checkpointing",
        "activation checkpointing computes parts of the forward again",
    ),
    CauseKind(
        "unused-output",
        MODEL,
        "outputs that nothing uses",
        "no loss, no other operator and no later step uses the result of operators of the forward",
    ),
    CauseKind(
        "unneeded-gradient",
        MODEL,
        "gradients of parameters that no optimizer updates",
        "the backward computes gradients that lead only to parameters that no optimizer updates",
    ),
    CauseKind(
        "second-backward",
        MODEL,
        "a second backward through the same operators",
        "a backward runs through operators that another backward of the step runs through, too, "
        "and none of them is of second order. Named is the one that adds to no `.grad`, else the "
        "later one",
    ),
    CauseKind(
        "padding",
        MODEL,
        "padding in the model's input",
        "a part of the model's largest input is padding: the same value at the end of sequences "
        "(batch, length) or (batch, length, features), or at the end of one of the last two "
        "dimensions of all samples (of images: if the script pads them). The share is that part of"
        " the model's operators. Not named with `pack_padded_sequence`",
    ),
    CauseKind(
        "slow-operators",
        MODEL,
        "operators far below the limits of the device",
        "a product reaches less than 20 % of the roofline (or of the best product of the step), or"
        " another operator less than 1 % of the memory bandwidth",
    ),
    CauseKind(
        "large-intermediate",
        MODEL,
        "large intermediate tensors",
        "an operator other than a convolution or a linear layer makes an output of 8 MiB or more "
        "that is 8 times as large as its inputs, or a tensor takes 10 % of the memory of a rank",
    ),
)
