"""What Horovod documents about ``horovod.tensorflow``: each function is one case on every rank.

Cases of ``both`` run eagerly and inside ``tf.function``.
"""

import importlib
import sys

import numpy as np
import pytest
import tensorflow as tf
from case_runner import raises, run_cases

import paceline.compat.horovod.tensorflow as hvd
from paceline.compat.horovod.common.exceptions import HorovodInternalError

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
INTEGERS = (tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64)
# What a collective's error becomes inside tf.function.
ERRORS = (HorovodInternalError, ValueError, tf.errors.OpError)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def both(function):
    """Run a case with an identity function, then with ``tf.function``."""
    CASES[f"{function.__name__}_eagerly"] = lambda rank, size: function(rank, size, lambda f: f)
    CASES[f"{function.__name__}_in_graph"] = lambda rank, size: function(rank, size, tf.function)
    return function


def own(rank, shape=(3, 2), dtype=tf.float32):
    """Return the tensor of a rank, which all ranks can compute."""
    count = int(np.prod(shape))
    return tf.cast(((np.arange(count) * 7 + 5 * rank) % 23).reshape(shape), dtype)


def every(size, *args, **options):
    return np.stack(
        [tf.cast(own(rank, *args, **options), tf.float64).numpy() for rank in range(size)]
    )


def equal(found, expected, tolerance=1e-6):
    found = tf.cast(found, tf.float64).numpy()
    np.testing.assert_allclose(found, np.asarray(expected, np.float64), tolerance, tolerance)


# Ranks


@case
def ranks_and_sizes(rank, size):
    assert hvd.is_initialized()
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert not hvd.mpi_enabled()
    assert hvd.gloo_built()


@both
def ranks_as_operations(rank, size, function):
    found = function(
        lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]
    )()
    assert [int(one) for one in found] == [rank, size, rank, size]


# Allreduce


@both
def allreduce_averages_by_default(rank, size, function):
    equal(function(lambda x: hvd.allreduce(x))(own(rank)), every(size).mean(0))


@both
def allreduce_sum_of_all_dtypes(rank, size, function):
    for dtype in (*FLOATS, *INTEGERS):
        found = function(lambda x: hvd.allreduce(x, op=hvd.Sum))(own(rank, dtype=dtype))
        assert found.dtype == dtype
        equal(found, every(size, dtype=dtype).sum(0))


@both
def allreduce_min_max_product(rank, size, function):
    equal(function(lambda x: hvd.allreduce(x, op=hvd.Min))(own(rank)), every(size).min(0))
    equal(function(lambda x: hvd.allreduce(x, op=hvd.Max))(own(rank)), every(size).max(0))
    equal(function(lambda x: hvd.allreduce(x, op=hvd.Product))(own(rank)), every(size).prod(0))


@both
def allreduce_leaves_its_input(rank, size, function):
    x = own(rank)
    function(lambda one: hvd.allreduce(one, op=hvd.Sum, name="kept"))(x)
    equal(x, own(rank))


@both
def allreduce_scales_before_and_after(rank, size, function):
    found = function(
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    )(own(rank))
    equal(found, every(size).sum(0) * 1.5)


@both
def allreduce_with_compression(rank, size, function):
    found = function(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16))(own(rank))
    assert found.dtype == tf.float32
    equal(found, every(size).mean(0), 1e-3)


@both
def allreduce_of_scalars_and_empty_tensors(rank, size, function):
    equal(function(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.constant(2.0)), 2.0 * size)
    found = function(lambda x: hvd.allreduce(x))(tf.zeros((0, 3)))
    assert found.shape == (0, 3)


@case
def allreduce_of_variables_and_arrays(rank, size):
    equal(hvd.allreduce(tf.Variable(own(rank))), every(size).mean(0))
    equal(hvd.allreduce(own(rank).numpy()), every(size).mean(0))


@case
def deprecated_average(rank, size):
    equal(hvd.allreduce(own(rank), average=False), every(size).sum(0))
    raises(ValueError, "supersedes average", hvd.allreduce, own(rank), average=True, op=hvd.Sum)


@both
def allreduce_of_slices(rank, size, function):
    """The gathered slices of all ranks are the sum."""

    def reduce(values, indices):
        slices = tf.IndexedSlices(values, indices, dense_shape=tf.constant([6, 2], tf.int64))
        return tf.convert_to_tensor(hvd.allreduce(slices))

    rows = 1 + rank
    values = tf.ones((rows, 2)) * (1.0 + rank)
    indices = tf.range(rows, dtype=tf.int64)
    expected = np.zeros((6, 2))
    for other in range(size):
        expected[: other + 1] += (1.0 + other) / size
    equal(function(reduce)(values, indices), expected)


@case
def slices_are_not_reduced_by_minimum(rank, size):
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]))
    raises(NotImplementedError, "op=Min", hvd.allreduce, slices, op=hvd.Min)


@both
def grouped_allreduce(rank, size, function):
    found = function(lambda a, b: hvd.grouped_allreduce([a, b], op=hvd.Sum))(
        own(rank), own(rank, (4,), tf.int32)
    )
    equal(found[0], every(size).sum(0))
    equal(found[1], every(size, (4,)).sum(0))


@both
def adasum_of_equal_tensors_is_the_tensor(rank, size, function):
    equal(function(lambda x: hvd.allreduce(x, op=hvd.Adasum))(own(0)), own(0), 1e-5)


# Other collectives


@both
def allgather_concatenates(rank, size, function):
    found = function(lambda x: hvd.allgather(x))(own(rank))
    equal(found, np.concatenate(list(every(size))))


@both
def allgather_with_different_rows(rank, size, function):
    found = function(lambda x: hvd.allgather(x))(own(rank, (rank + 1, 2)))
    expected = np.concatenate([own(one, (one + 1, 2)).numpy() for one in range(size)])
    equal(found, expected)


@both
def allgather_of_all_dtypes(rank, size, function):
    for dtype in (*FLOATS, *INTEGERS, tf.bool):
        found = function(lambda x: hvd.allgather(x))(own(rank, (2, 2), dtype))
        assert found.dtype == dtype
        equal(found, np.concatenate([own(r, (2, 2), dtype).numpy() for r in range(size)]))


@both
def grouped_allgather(rank, size, function):
    found = function(lambda a, b: hvd.grouped_allgather([a, b]))(own(rank), own(rank, (1,)))
    equal(found[0], np.concatenate(list(every(size))))
    equal(found[1], np.concatenate(list(every(size, (1,)))))


@both
def broadcast_of_all_dtypes(rank, size, function):
    for dtype in (*FLOATS, *INTEGERS, tf.bool):
        found = function(lambda x: hvd.broadcast(x, size - 1))(own(rank, dtype=dtype))
        equal(found, tf.cast(own(size - 1, dtype=dtype), tf.float64))


@both
def alltoall_with_equal_rows(rank, size, function):
    found = function(lambda x: hvd.alltoall(x))(own(rank, (2 * size, 2)))
    parts = [own(one, (2 * size, 2)).numpy()[2 * rank : 2 * rank + 2] for one in range(size)]
    equal(found, np.concatenate(parts))


@both
def alltoall_with_splits(rank, size, function):
    rows = sum(range(1, size + 1))
    splits = tf.range(1, size + 1)
    found, received = function(lambda x, s: hvd.alltoall(x, s))(own(rank, (rows, 2)), splits)
    start = sum(range(1, rank + 1))
    parts = [own(one, (rows, 2)).numpy()[start : start + rank + 1] for one in range(size)]
    equal(found, np.concatenate(parts))
    assert received.numpy().tolist() == [rank + 1] * size


@both
def reducescatter_averages_by_default(rank, size, function):
    found = function(lambda x: hvd.reducescatter(x))(own(rank, (2 * size, 3)))
    equal(found, every(size, (2 * size, 3)).mean(0)[2 * rank : 2 * rank + 2])


@both
def grouped_reducescatter(rank, size, function):
    found = function(lambda a, b: hvd.grouped_reducescatter([a, b], op=hvd.Sum))(
        own(rank, (size, 2)), own(rank, (size + 1,))
    )
    equal(found[0], every(size, (size, 2)).sum(0)[rank : rank + 1])
    first = 0 if rank == 0 else rank + 1
    rows = 2 if rank == 0 else 1
    equal(found[1], every(size, (size + 1,)).sum(0)[first : first + rows])


@case
def barrier_and_join(rank, size):
    hvd.barrier()
    if rank == 0:
        hvd.allreduce(tf.ones(3), op=hvd.Sum, name="before_join")
    assert hvd.join() in range(size)


# Gradients


def gradient_of(function, operation, x):
    @function
    def compute(one):
        with tf.GradientTape() as tape:
            tape.watch(one)
            loss = tf.reduce_sum(operation(one) * 2.0)
        return tape.gradient(loss, one)

    return compute(x)


@both
def gradient_of_allreduce(rank, size, function):
    x = own(rank)
    equal(gradient_of(function, lambda one: hvd.allreduce(one), x), np.full((3, 2), 2.0))
    summed = gradient_of(function, lambda one: hvd.allreduce(one, op=hvd.Sum), x)
    equal(summed, np.full((3, 2), 2.0 * size))


@both
def gradient_of_allgather(rank, size, function):
    found = gradient_of(function, hvd.allgather, own(rank, (rank + 1, 2)))
    equal(found, np.full((rank + 1, 2), 2.0))


@both
def gradient_of_broadcast(rank, size, function):
    found = gradient_of(function, lambda one: hvd.broadcast(one, 0), own(rank))
    equal(found, np.full((3, 2), 2.0 if rank == 0 else 0.0))


@both
def gradient_of_alltoall(rank, size, function):
    equal(gradient_of(function, hvd.alltoall, own(rank, (size, 2))), np.full((size, 2), 2.0))
    splits = tf.ones(size, tf.int32)
    found = gradient_of(
        function, lambda one: hvd.alltoall(one, splits)[0], own(rank, (size + 1, 2))
    )
    equal(found, np.concatenate([np.full((size, 2), 2.0), np.zeros((1, 2))]))


@both
def gradient_of_reducescatter(rank, size, function):
    found = gradient_of(
        function, lambda one: hvd.reducescatter(one, op=hvd.Sum), own(rank, (size, 2))
    )
    equal(found, np.full((size, 2), 2.0 * size))


# Variables and objects


@case
def broadcast_variables(rank, size):
    variables = [tf.Variable(own(rank)), tf.Variable(rank), tf.Variable(rank > 0)]
    hvd.broadcast_variables(variables, root_rank=size - 1)
    equal(variables[0], own(size - 1))
    assert (int(variables[1]), bool(variables[2].numpy())) == (size - 1, size > 1)
    hvd.broadcast_(variables[:1], 0)


@case
def broadcast_variables_in_graph(rank, size):
    variable = tf.Variable(own(rank))
    tf.function(lambda: hvd.broadcast_variables([variable], root_rank=0))()
    equal(variable, own(0))


@case
def objects(rank, size):
    assert hvd.broadcast_object({"rank": rank, "x": [1, 2]}) == {"rank": 0, "x": [1, 2]}
    assert hvd.broadcast_object_fn(root_rank=size - 1)(rank) == size - 1
    assert hvd.allgather_object(("rank", rank)) == [("rank", one) for one in range(size)]


@case
def global_variables_have_a_way_out(rank, size):
    raises(NotImplementedError, "HINT: ", hvd.broadcast_global_variables, 0)


# Tapes


@both
def tape_averages_gradients(rank, size, function):
    weights = [tf.Variable(tf.ones((3, 2))), tf.Variable(2.0), tf.Variable(0.0)]

    @function
    def compute(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights[0] * x) * weights[1]
        return hvd.DistributedGradientTape(tape).gradient(loss, weights)

    first, second, unused = compute(own(rank))
    equal(first, 2.0 * every(size).mean(0))
    equal(second, every(size).mean(0).sum())
    assert unused is None


@both
def tape_sums_scales_and_compresses(rank, size, function):
    weight = tf.Variable(tf.ones((3, 2)))

    def compute(**options):
        @function
        def call(x):
            with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
                loss = tf.reduce_sum(weight * x)
            return tape.gradient(loss, {"weight": weight})["weight"]

        return call(own(rank))

    equal(compute(op=hvd.Sum), every(size).sum(0))
    equal(compute(gradient_predivide_factor=2.0), every(size).mean(0))
    equal(compute(compression=hvd.Compression.fp16), every(size).mean(0), 1e-3)
    equal(compute(groups=1), every(size).mean(0))
    equal(compute(groups=[[weight]]), every(size).mean(0))


@both
def tape_with_large_gradients_in_parts(rank, size, function):
    """Gradients beyond a megabyte are submitted in several parts, while others are computed."""
    weights = [tf.Variable(tf.ones((600, 600))) for _ in range(4)]

    @function
    def compute(x):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(one * x) * (at + 1) for at, one in enumerate(weights))
        return hvd.DistributedGradientTape(tape).gradient(loss, weights)

    for _ in range(2):
        found = compute(tf.fill((600, 600), float(rank)))
        for at, one in enumerate(found):
            equal(one, np.full((600, 600), (at + 1) * (size - 1) / 2))


@both
def tape_with_sparse_gradients(rank, size, function):
    table = tf.Variable(tf.ones((4, 2)))

    def compute(**options):
        @function
        def call(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows))
            gradient = hvd.DistributedGradientTape(tape, **options).gradient(loss, table)
            return tf.convert_to_tensor(gradient)

        return call(tf.constant([0, 1 + rank % 3]))

    expected = np.zeros((4, 2))
    for other in range(size):
        expected[[0, 1 + other % 3]] += 1 / size
    equal(compute(), expected)
    equal(compute(sparse_as_dense=True), expected)


@both
def tape_with_local_sources(rank, size, function):
    local, shared = tf.Variable(1.0), tf.Variable(1.0)

    @function
    def compute(x):
        with tf.GradientTape() as tape:
            loss = (local + shared) * x
        distributed = hvd.DistributedGradientTape(tape)
        distributed.register_local_source(local)
        return distributed.gradient(loss, [local, shared])

    found = compute(tf.constant(float(rank)))
    equal(found[0], rank / size)
    equal(found[1], (size - 1) / 2)


@case
def tape_refuses_bad_arguments(rank, size):
    tape = tf.GradientTape()
    raises(ValueError, "HINT: ", hvd.DistributedGradientTape, "tape")
    raises(ValueError, "groups should be", hvd.DistributedGradientTape, tape, groups="all")
    raises(ValueError, "Product", hvd.DistributedGradientTape, tape, op=hvd.Product)


# Several collectives of one graph


@case
def independent_collectives_of_a_graph_end(rank, size):
    """TensorFlow would run them in any order, in few threads."""

    @tf.function
    def compute(x):
        found = [hvd.allreduce(x * float(at), op=hvd.Sum, name=f"many.{at}") for at in range(12)]
        gathered = [hvd.allgather(x + float(at)) for at in range(6)]
        return tf.add_n(found), tf.add_n(gathered)

    for _ in range(3):
        total, gathered = compute(own(rank))
        equal(total, every(size).sum(0) * sum(range(12)))
        equal(gathered, 6 * np.concatenate(list(every(size))) + 15)


@case
def collectives_of_nested_functions_keep_their_order(rank, size):
    """TensorFlow orders a function with variables, and a call of the host, only by their inputs."""
    factor = tf.Variable(1.0)

    def late(x, on):
        if rank == on:
            many = tf.fill((500, 500), x[0] / x[0])
            for _ in range(12):
                many = tf.linalg.matmul(many, many) / 500.0
            x = x + tf.cast(tf.reduce_mean(many) > 2.0, tf.float32)
        return x

    @tf.function
    def inner(x):
        return hvd.allreduce(late(x, 0) * factor, op=hvd.Sum)

    @tf.function
    def outer(x):
        first, second = inner(x), hvd.allreduce(late(10 * x, 1), op=hvd.Sum)
        third = tf.cond(
            tf.reduce_sum(x) > 0, lambda: hvd.allreduce(late(100 * x, 0), op=hvd.Sum), lambda: x
        )
        return first, second, third, hvd.allreduce(late(1000 * x, 1), op=hvd.Sum)

    for _ in range(3):
        for at, found in enumerate(outer(tf.ones(2))):
            equal(found, [size * 10.0**at] * 2)


@case
def collectives_in_loops_and_branches(rank, size):
    @tf.function
    def compute(x):
        for at in tf.range(3):
            if at == 1:  # noqa: SIM108  a branch of the graph
                x = hvd.allreduce(x, op=hvd.Sum)
            else:
                x = hvd.allreduce(x)
        return x

    equal(compute(own(rank)), every(size).mean(0) * size)


# Process sets


@case
def process_sets(rank, size):
    members = hvd.add_process_set([0])
    if rank == 0:
        equal(hvd.allreduce(own(rank), op=hvd.Sum, process_set=members), own(0))
    else:
        raises(ValueError, "not in process set", hvd.allreduce, own(rank), process_set=members)
    weight = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = weight * float(rank + 3)
    found = hvd.DistributedGradientTape(tape, process_set=members).gradient(loss, weight)
    equal(found, rank + 3)
    hvd.remove_process_set(members)


# Mistakes


def _mismatch(rank, size, function, text, call):
    if size > 1:
        raises(ERRORS, text, function(call))


@both
def different_shapes_are_named(rank, size, function):
    call = lambda: hvd.allreduce(tf.ones(2 + rank), name="shapes")  # noqa: E731
    _mismatch(rank, size, function, "mismatched shapes: rank 0 has [2]", call)


@both
def different_dtypes_are_named(rank, size, function):
    dtype = tf.float64 if rank else tf.float32
    call = lambda: hvd.allreduce(tf.ones(2, dtype), name="dtypes")  # noqa: E731
    _mismatch(rank, size, function, "mismatched dtypes: rank 0 has float32", call)


@both
def different_operations_are_named(rank, size, function):
    def call():
        return hvd.allreduce(tf.ones(2), op=hvd.Sum if rank else hvd.Average, name="ops")

    _mismatch(rank, size, function, "mismatched reductions", call)


@case
def strings_have_a_way_out(rank, size):
    raises(ERRORS, "HINT: hvd.broadcast_object", hvd.broadcast, tf.constant("text"), 0)


@case
def xla_is_refused(rank, size):
    function = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
    raises(ValueError, "HINT: model.compile(..., jit_compile=False)", function, own(rank))


@case
def unknown_reduction_is_refused(rank, size):
    raises(ValueError, "is not a reduction", hvd.allreduce, own(rank), op=17)


@case
def copies_of_gpus_are_said_once_in_a_job(rank, size):
    said = []
    library = importlib.import_module("paceline.compat.horovod.tensorflow_ops.library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0"])
        patch.setattr(library, "notify", said.append)
        hvd.init()
        importlib.import_module("paceline.compat.ddl.callbacks")
    assert len(said) == (0 if rank else 2), said
    assert all("copied from the GPU" in text and "HINT: " in text for text in said)


if __name__ == "__main__":
    run_cases(hvd, CASES, sys.argv[1])
