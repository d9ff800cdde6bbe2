"""All causes of lost time, and all indicators of one: those of each module of ``rules/``."""

from .descriptions import CauseKind, Indicator
from .rules import compute, exchange, inputs, layouts, lines, operators, ranks, script

# By id, in the order of docs/reference/causes.md.
CAUSES: dict[str, CauseKind] = {
    cause.id: cause
    for module in (*(inputs, exchange, layouts, ranks, lines, script, compute, operators),)
    for cause in module.CAUSES
}
# By name, in the order of the tables of a diagnosis.
INDICATORS: dict[str, Indicator] = {
    indicator.name: indicator
    for indicator in (
        *ranks.BARS,
        *exchange.INDICATORS,
        *inputs.INDICATORS,
        *ranks.PHASES,
        *layouts.INDICATORS,
        *script.INDICATORS,
        *ranks.CORES,
        *compute.INDICATORS,
    )
}
