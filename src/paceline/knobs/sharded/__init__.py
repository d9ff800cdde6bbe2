"""The knobs of sharded models (FSDP2), and remedies for them that need an edit of the script.

``registry.KNOBS`` contains them. parallel/sharded/prefetch.py sets the knobs.
"""

from ..knob import Knob
from ..value_types import ON, Range

_CAUSE = ("sharded-exchange",)
_SHARDS = r"\bfully_shard\(|\.distribute\("

SHARDED: dict[str, Knob] = {
    "sharded-prefetch": Knob(
        "number of blocks of a sharded model that are gathered ahead, in forward and in backward",
        _CAUSE,
        "set_modules_to_forward_prefetch and set_modules_to_backward_prefetch of each block, with "
        "the next {value} blocks",
        "parallel.sharded.prefetch:set_prefetch",
        Range(1, 16),
        _SHARDS,
        "memory for these blocks; a gather without use for each block that a forward leaves out",
    ),
    "sharded-keep-gathered": Knob(
        "blocks of a sharded model stay gathered between forward and backward",
        _CAUSE,
        'fully_shard(reshard_after_forward=False), or world.distribute(layout="zero2")',
        "parallel.sharded.prefetch:set_keep_gathered",
        ON,
        _SHARDS,
        "memory for all parameters on each rank",
    ),
    "sharded-blocks": Knob(
        "blocks of a sharded model have another size",
        _CAUSE,
        "{value}",
        looks_for=_SHARDS,
    ),
    "data-parallel": Knob(
        "the model is not sharded",
        _CAUSE,
        "{value}",
        looks_for=_SHARDS,
        costs="memory for parameters, gradients and optimizer states of the whole model on each "
        "rank",
        effort=2,
    ),
}
