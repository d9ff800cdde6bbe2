"""Call functions of this process on TensorFlow's tensors, eagerly and inside ``tf.function``.

A function gets tensors of torch that share the memory of TensorFlow's, and must not change them.
Its results become tensors of TensorFlow in the same memory. Where memory can't be shared (booleans,
tensors on a GPU), it is copied.

Calls of graphs run one after the other, in the order in which the script makes them, also where one
graph calls another. So the ranks number collectives without a name alike, and a rank never waits
for two collectives in two threads of TensorFlow, which has few: ranks that wait for different ones
would wait for ever. Each call reads and assigns a variable (``_turn``): ``tf.function`` runs what
uses a variable in the order of the script. It does not do so in the graphs that it makes for
gradients, so that each call also depends on the last one of its graph.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ....record.hooks import error_messages
from ....record.ring.recorder import waiting_for_this_thread
from ..core.errors import HorovodInternalError
from .library import tf

Function = Callable[..., Sequence[torch.Tensor]]
_dlpack: Any = torch.utils.dlpack
ALIGNMENT = 64  # bytes; TensorFlow aborts at tensors that it finds unaligned
_LAST = "_paceline_last_call"  # attribute of a graph: the operation of its last call
_XLA = (
    "Horovod's operations can't be called from a function that XLA compiles for a device: XLA has "
    "no calls of the host. HINT: model.compile(..., jit_compile=False), or "
    "tf.function(jit_compile=False)"
)
_last_error: HorovodInternalError | ValueError | None = None  # of a call in a graph
# numpy's arrays of TensorFlow's inputs are read-only, as they are used here
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def call_on_host(
    function: Function, inputs: Sequence[Any], outputs: Sequence[Any], is_ordered: bool = True
) -> list[Any]:
    """Return the tensors that a function computes.

    Args:
        function: Gets a tensor of torch for each input, and returns one for each output.
        inputs: Tensors of TensorFlow.
        outputs: ``tf.TensorSpec`` of each result; a dimension may be None.
        is_ordered: Whether later calls wait for this one. False only for calls that do not wait
            for other ranks.

    Raises:
        ValueError: The call is in a function that XLA compiles, or a tensor has strings.
    """
    if any(one.dtype == tf.string for one in inputs):
        raise ValueError(
            "tensors of strings can't be exchanged. HINT: hvd.broadcast_object or "
            "hvd.allgather_object"
        )
    if tf.executing_eagerly():
        results = function(*[from_tensorflow(one) for one in inputs])
        return [to_tensorflow(result) for result in results]
    graph = tf.compat.v1.get_default_graph()
    if _is_compiled(graph):
        raise ValueError(_XLA)
    dtypes = [spec.dtype for spec in outputs]

    def call(*arrays: Any) -> list[Any]:
        global _last_error
        try:
            with waiting_for_this_thread():
                results = function(*[_from_array(one) for one in arrays])
                return [_to_array(one, dtype) for one, dtype in zip(results, dtypes, strict=True)]
        except HorovodInternalError as error:
            _last_error = error
            raise error.with_traceback(None) from None  # TensorFlow's log repeats the traceback
        except ValueError as error:
            _last_error = error
            raise

    turn, last = _turn().read_value(), getattr(graph, _LAST, None)
    with tf.control_dependencies([turn] if last is None else [turn, last]):
        found = tf.numpy_function(call, list(inputs), dtypes, stateful=True)
    if is_ordered:
        with tf.control_dependencies([found[0].op if dtypes else found]):
            setattr(graph, _LAST, _turn().assign(turn, read_value=False))
    for tensor, spec in zip(found if dtypes else (), outputs, strict=True):
        tensor.set_shape(spec.shape)
    return list(found) if dtypes else []


def error_of_call(error: BaseException) -> HorovodInternalError | ValueError | None:
    """Return the error of a call in a graph that TensorFlow has turned into an error of its own.

    None for other errors.
    """
    is_of_call = isinstance(error, tf.errors.OpError) and str(_last_error) in str(error)
    return _last_error if is_of_call else None


error_messages.causes.append(error_of_call)


@functools.cache
def _turn() -> Any:
    """Return the variable that all calls of graphs use.

    It is created with the first one: TensorFlow can't be configured after its first variable.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False)


def specs_of(tensors: Sequence[Any]) -> list[Any]:
    """Return the ``tf.TensorSpec`` of results with the shapes and dtypes of these tensors."""
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]


def from_tensorflow(tensor: Any) -> torch.Tensor:
    """Return an eager tensor as one of torch in the same memory, where that is possible."""
    is_on_host = "GPU" not in tensor.device
    if is_on_host and tensor.dtype != tf.bool and tensor.shape.num_elements():
        shared: torch.Tensor = _dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
        return shared
    return _from_array(tensor.numpy())


def to_tensorflow(tensor: torch.Tensor) -> Any:
    """Return a tensor of torch as an eager one in the same memory, where that is possible."""
    if tensor.dtype == torch.bool or not tensor.numel():
        return tf.constant(_to_array(tensor, _dtype_of(tensor)))
    tensor = tensor.detach().contiguous()
    if tensor.data_ptr() % ALIGNMENT:  # a part of another tensor
        tensor = tensor.clone()
    return tf.experimental.dlpack.from_dlpack(_dlpack.to_dlpack(tensor))


def _dtype_of(tensor: torch.Tensor) -> Any:
    return tf.as_dtype(str(tensor.dtype).removeprefix("torch."))


def _from_array(array: Any) -> torch.Tensor:
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if array.dtype == tf.bfloat16.as_numpy_dtype:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_array(tensor: torch.Tensor, dtype: Any) -> Any:
    tensor = tensor.detach().contiguous().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return tensor.numpy().astype(dtype.as_numpy_dtype, copy=False)


def _is_compiled(graph: Any) -> bool:
    """Return whether XLA compiles the function that is traced into a graph."""
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False
