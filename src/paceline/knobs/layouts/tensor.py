"""Remedies for the exchange of a tensor axis, which need an edit of the script.

``registry.KNOBS`` contains them.
"""

from ..knob import Knob

_CAUSE = ("tensor-exchange",)
_DIVIDES = r"\btp\d|\btp=|\.distribute\("

TENSOR: dict[str, Knob] = {
    "tensor-axis": Knob(
        "the tensor axis has fewer ranks, and the data axis more",
        _CAUSE,
        "{value}",
        looks_for=_DIVIDES,
        costs="memory for a larger part of the divided layers on each rank; a larger global batch, "
        "or smaller batches of a rank",
    ),
    "sequence-split": Knob(
        "norms and dropout compute with parts of the tokens: reduce-scatters and all-gathers in "
        "place of all-reduces",
        _CAUSE,
        "{value}",
        looks_for=_DIVIDES,
        costs="one more small sum for the gradient of each norm",
    ),
}
