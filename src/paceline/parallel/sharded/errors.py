"""Causes of errors of sharded models."""

import traceback

from ...record.hooks.collective_check import SAME_BLOCKS, block_in

_AVERAGE = "average = [p.detach().clone() for p in model.parameters()] after world.distribute"
# of the exchange in shared memory
_MISMATCH_PHRASE = "ranks call different collectives"


def explain(error: BaseException) -> str | None:
    """Return the cause of an error of a sharded model, and what to do; None for other errors."""
    text = str(error)
    if "mixed torch.Tensor and DTensor" in text:
        return (
            "an operation outside of a forward used a sharded parameter together with a whole "
            "tensor. HINT: compute it inside model(...), or in a method of the model that has a "
            f"tensor among its arguments; to average weights, {_AVERAGE}"
        )
    if "FSDP does not support deepcopy" in text or ("pickle" in text and ".FSDP" in text):
        return (
            "a sharded model can't be copied or pickled as a whole, because each rank has only "
            f"its shards. HINT: to average weights, {_AVERAGE}; to save them in one file, "
            "world.epochs(checkpoint=FOLDER), then `paceline convert FOLDER model.safetensors`"
        )
    if "setStorage" in text and "of size 0" in text:
        return (
            "a backward needs parameters of a sharded block that another backward of the same "
            "forward has released, such as torch.autograd.grad(..., create_graph=True) for a "
            "gradient penalty. HINT: layout='data'"
        )
    if _MISMATCH_PHRASE in text:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        block = next((found for frame in reversed(frames) if (found := block_in(frame))), None)
        if block is not None:
            what = text.partition(". HINT: ")[0].strip().splitlines()[0]
            return f"{what}; this rank gathers or reduces {block[1]}. HINT: {SAME_BLOCKS}"
    return None
