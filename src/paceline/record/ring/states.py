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
    COLLECTIVE = 8  # from the call to the observed completion
    BLOCKED = 9  # the rank waits for the collective of the same group and number
    STEP = 10  # between the ends of two optimizer steps; amount = samples of this rank
    GAP = 11  # from the end of a step to the next forward, without a DataLoader call between
    CALL = 13  # the launch of a collective that is not waited for immediately
    KERNEL = 14  # compute kernels on a GPU in sampled steps; amount = number of kernels
    COMMUNICATION_KERNEL = 15  # one communication kernel on a GPU in sampled steps
    SAMPLE = 12  # position in the script at an instant; amount = number of the line
    STILL = 16  # stall: no thread of the rank ran, in whichever state it was
    # Like COLLECTIVE and BLOCKED, in another thread than the one that trains: beside its states.
    BACKGROUND_COLLECTIVE = 17
    BACKGROUND_BLOCKED = 18
    MEMORY = 24  # memory at an instant; amount = bytes, peer = which (Memory)
    STARVED = 25  # of the training thread: amount = ns of it in which the thread had no core
    OTHERS_STARVED = 26  # the same of other threads, peer = whose (CoreWait), seq = busy threads
    # Squared norm (amount: see SQUARE_UNIT) of the gradient of step seq, of peer samples of this
    # rank: before its exchange (op 0); this rank's part of that of all ranks (op 1)
    GRADIENT = 27


class Memory(IntEnum):
    """What a MEMORY event measures."""

    HOST = 0  # of this rank
    HOST_AVAILABLE = 1  # left for all processes of the node, or of the job's cgroup there
    DEVICE = 2  # allocated by this rank
    DEVICE_AVAILABLE = 3  # the rest of its device


class CoreWait(IntEnum):
    """Whose waits for a core an OTHERS_STARVED event sums up."""

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


# A squared norm x is the amount (log2(x) + SQUARE_OFFSET) * SQUARE_UNIT.
SQUARE_OFFSET, SQUARE_UNIT = 1100, 1 << 40
NO_PEER = -1
# The amount of a forward or backward of micro-batch seq - 1 is the virtual stage (chunk) times
# PARTS, plus the part of a backward: all of it, of the activations, of the parameters.
PARTS_OF_BACKWARD = {0: "B", 1: "I", 2: "W"}
PARTS = 4
# A collective of block N of a sharded model (FSDP2) has the peer FIRST_BLOCK_PEER - N.
FIRST_BLOCK_PEER = -2
SAMPLER_STATES = (
    State.SAMPLE,
    State.STILL,
    State.MEMORY,
    State.OTHERS_STARVED,
)  # written by the stack sampler, possibly while the rank waits in a call
# Beside the states of the training thread: samples, and what is taken out of its states.
BESIDE_STATES = (*SAMPLER_STATES, State.STARVED, State.GRADIENT)
BACKGROUND_STATES = (State.BACKGROUND_COLLECTIVE, State.BACKGROUND_BLOCKED)
LAUNCH_STATES = (State.COLLECTIVE, State.BACKGROUND_COLLECTIVE)
POINT_TO_POINT_OPS = (Op.SEND, Op.RECV)
BLOCKING_STATES = (State.BLOCKED, State.CALL)
USEFUL_STATES = (State.FORWARD, State.LOSS, State.BACKWARD, State.OPTIMIZER)
ROOTED_OPS = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
