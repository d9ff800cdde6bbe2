"""Numbers of states and collectives in an event. See docs/reference/record-format.md."""

from enum import IntEnum


class State(IntEnum):
    """What an event says the rank was doing from its start to its end."""

    INPUT = 1  # waiting for the next batch
    FORWARD = 2  # the outermost module
    LOSS = 3  # from the forward's end to the backward's start
    BACKWARD = 4
    OPTIMIZER = 5
    CHECKPOINT = 6  # training stands still for a copy or a write
    VALIDATION = 7
    COLLECTIVE = 8  # in flight: from the call to its known completion
    BLOCKED = 9  # the rank stands still for the collective of the same group and number
    STEP = 10  # from one optimizer step's end to the next one's; amount = samples of this rank
    GAP = 11  # from a step's end to the next forward, where no DataLoader was asked meanwhile
    CALL = 13  # the call that launches a collective, where nobody waits right after it
    KERNEL = 14  # on a GPU, in sampled steps: kernels that compute; amount = how many
    COMMUNICATION_KERNEL = 15  # on a GPU, in sampled steps: one kernel that communicates
    SAMPLE = 12  # an instant: where in the script the rank was; amount = number of the line
    STILL = 16  # none of its threads ran, whatever it was in


class Op(IntEnum):
    """Which collective a COLLECTIVE or BLOCKED event belongs to."""

    ALL_REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SEND = 10
    RECV = 11


SAMPLER_STATES = (
    State.SAMPLE,
    State.STILL,
)  # the sampler's, about a rank that may stand still in a call
POINT_TO_POINT_OPS = (Op.SEND, Op.RECV)
BLOCKING_STATES = (State.BLOCKED, State.CALL)
USEFUL_STATES = (State.FORWARD, State.LOSS, State.BACKWARD, State.OPTIMIZER)
ROOTED_OPS = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
