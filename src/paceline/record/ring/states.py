"""Numeric codes of states and collectives in an event.

See docs/reference/formats/record-format.md.
"""

from enum import IntEnum


class State(IntEnum):
    """The state of a rank between the start and the end of an event."""

    INPUT = 1  # wait for the next batch
    FORWARD = 2  # of the outermost module
    LOSS = 3  # from the end of the forward to the start of the backward
    BACKWARD = 4
    OPTIMIZER = 5
    CHECKPOINT = 6  # training waits for a copy or a write
    VALIDATION = 7
    COLLECTIVE = 8  # in flight: from the call to the observed completion
    BLOCKED = 9  # the training thread waits for the collective of the same group and seq
    STEP = 10  # between the ends of two optimizer steps; amount = samples of this rank
    GAP = 11  # from the end of a step to the next forward, without a DataLoader call between
    CALL = 13  # the call that launches a collective for which no thread waits directly afterwards
    KERNEL = 14  # compute kernels on a GPU in sampled steps; amount = number of kernels
    COMMUNICATION_KERNEL = 15  # one communication kernel on a GPU in sampled steps
    SAMPLE = 12  # sample of the stack: position in the script at an instant; amount = line number
    STILL = 16  # stall: no thread of the rank ran, whichever state the rank was in
    # Same as COLLECTIVE and BLOCKED, in another thread than the training thread. They overlap the
    # training thread's states.
    BACKGROUND_COLLECTIVE = 17
    BACKGROUND_BLOCKED = 18
    MEMORY = 24  # memory at an instant; amount = bytes, peer = which (Memory)
    STARVED = 25  # amount = ns in which the training thread was ready to run and had no core
    OTHERS_STARVED = 26  # same for other threads; peer = which (CoreWait), seq = number of them
    # At an instant: squared norm (amount, see SQUARE_UNIT) of the gradient of step seq; peer =
    # number of this rank's samples in it. op 0: this rank's gradient before the exchange; op 1:
    # this rank's part of the exchanged gradient.
    GRADIENT = 27


class Memory(IntEnum):
    """What a MEMORY event measures."""

    HOST = 0  # resident memory of this rank
    HOST_AVAILABLE = 1  # free host memory of the node, or of the job's cgroup on the node
    DEVICE = 2  # device memory that this rank has allocated
    DEVICE_AVAILABLE = 3  # free memory of this rank's device


class CoreWait(IntEnum):
    """Threads whose waits for a core an OTHERS_STARVED event sums."""

    THREADS = 0  # of the rank, except the training thread
    CHILDREN = 1  # all threads of the rank's child processes, e.g. workers of a loader


class Op(IntEnum):
    """The collective operation of a COLLECTIVE or BLOCKED event."""

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


# Amounts are integers: a squared norm x is stored as (log2(x) + SQUARE_OFFSET) * SQUARE_UNIT. The
# offset makes the logarithm of every float64 positive.
SQUARE_OFFSET, SQUARE_UNIT = 1100, 1 << 40
NO_PEER = -1
# In a pipeline, the amount of the forward or backward of micro-batch seq - 1 is chunk *
# PARTS_PER_CHUNK + part: chunk is the virtual stage, part is 0 for a forward and a key of
# BACKWARD_PARTS for a backward. "B": whole, "I": of the activations, "W": of the parameters.
BACKWARD_PARTS = {0: "B", 1: "I", 2: "W"}
PARTS_PER_CHUNK = 4
# A collective of block N of a sharded model (FSDP2) has the peer FIRST_BLOCK_PEER - N.
FIRST_BLOCK_PEER = -2
SAMPLER_STATES = (
    State.SAMPLE,
    State.STILL,
    State.MEMORY,
    State.OTHERS_STARVED,
)  # written by the stack sampler, possibly while the rank waits in a call
# Events that are additional to the states of the training thread, which they overlap.
BESIDE_STATES = (*SAMPLER_STATES, State.STARVED, State.GRADIENT)
BACKGROUND_STATES = (State.BACKGROUND_COLLECTIVE, State.BACKGROUND_BLOCKED)
LAUNCH_STATES = (State.COLLECTIVE, State.BACKGROUND_COLLECTIVE)
POINT_TO_POINT_OPS = (Op.SEND, Op.RECV)
BLOCKING_STATES = (State.BLOCKED, State.CALL)  # other ranks may hold up the training thread
USEFUL_STATES = (State.FORWARD, State.LOSS, State.BACKWARD, State.OPTIMIZER)
ROOTED_OPS = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
