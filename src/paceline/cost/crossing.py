"""The warning about ranks that exchange in each layer and are on several nodes."""

from collections.abc import Sequence

from ..plurals import named_ranks

# Their ranks exchange in each layer, so a slow link between them is reported.
FREQUENT_AXES = ("depth", "height", "width", "tensor")


def crossing_line(axis: str, groups: Sequence[Sequence[int]], nodes: Sequence[str]) -> str:
    """Return a line about ranks of an axis on several nodes; "" if there are none.

    Args:
        groups: The ranks of each group of the axis.
        nodes: Of each rank, its node.
    """
    crossing = [ranks for ranks in groups if len({nodes[rank] for rank in ranks}) > 1]
    if not crossing or axis not in FREQUENT_AXES:
        return ""
    of_node = min(nodes.count(node) for node in nodes)
    hint = f"an extent that divides the {of_node} ranks of a node"
    if of_node < 2:
        hint = f"several ranks on each node, or a layout without the axis {axis}"
    return (
        f"the ranks of the axis {axis} exchange in each layer, and {named_ranks(crossing[0])} "
        f"are on several nodes. HINT: {hint}"
    )
