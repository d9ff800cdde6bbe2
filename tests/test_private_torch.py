"""Private interfaces of PyTorch that Paceline uses: one table, and a test for each row.

Run this file first with a new version of PyTorch. A row that fails names what is missing, the
module that uses it and the purpose. ``test_table_is_complete`` searches the source for private
names, so every new use needs an entry in the table.

A row's name is a path from a module or from one of the objects in ``objects``: a DDP model, its
reducer and logger, the iterator of a DataLoader, a process group, a profiler.
"""

import ast
import importlib
import inspect
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from imports import texts
from torch.distributed._tools import mem_tracker
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import paceline
from paceline.parallel.sharded.fully_sharded import groups_of

SOURCE = Path(paceline.__file__).parent

C10D = "torch.distributed.distributed_c10d"
BOUND = "torch._C._distributed_c10d"
FSDP = "torch.distributed.fsdp._fully_shard."
# name: its purpose in Paceline
INTERFACES = {
    # Process groups: the one place that records collectives (record/hooks, comm/backend.py)
    f"{C10D}._new_process_group_helper": "wrapped: each new group is recorded, and gets knobs",
    f"{C10D}._world.pg_map": "all groups of the process",
    f"{C10D}._world.pg_names": "the name of a group",
    f"{C10D}._get_default_store": "the store of the job",
    f"{C10D}._coalescing_manager": "several collectives as one",
    f"{C10D}._abort_process_group": "leaves a group of NCCL after a failure, without waiting",
    "group._allgather_base": "the check of ranks that disagree about a collective",
    "group._get_backend": "the backend of a device",
    "group._device_types": "devices that a group has backends for",
    "group._set_default_backend": "a wrapped group has the backends of the group inside",
    "group._register_backend": "a wrapped group has the backends of the group inside",
    "group._set_group_name": "a wrapped group has the name of the group inside",
    "group._set_group_desc": "a wrapped group has the description of the group inside",
    "group._set_sequence_number_for_group": "gloo checks the order of collectives in debug mode",
    f"{BOUND}._register_process_group": "functional collectives find the wrapped group",
    f"{BOUND}._unregister_process_group": "functional collectives find the wrapped group",
    f"{BOUND}.AllgatherOptions": "options of a collective that is called directly",
    f"{BOUND}.AllToAllOptions": "options of a collective that is called directly",
    f"{BOUND}.FakeProcessGroup._create_internal": "experiments without communication",
    f"{BOUND}._create_work_from_future": "a finished collective, in such experiments",
    f"{BOUND}.GradBucket": "type of DDP's communication hooks",
    f"{BOUND}.HashStore": "a store inside one process",
    f"{BOUND}.PrefixStore": "a part of a store",
    f"{BOUND}.TCPStore": "the store of ranks and nodes",
    f"{BOUND}.Work._source_rank": "sender of a message that was received from any rank",
    "torch.distributed.rendezvous._torchelastic_use_agent_store": "whose store env:// uses",
    "torch.distributed.rendezvous._rendezvous_handlers": "a rehearsed rank has no network",
    "torch.ops._c10d_functional": "functional collectives that are recorded",
    # Memory of a step without data (parallel/memory)
    "torch._subclasses.fake_tensor.FakeTensorMode": "tensors without data",
    "torch._subclasses.fake_tensor.FakeTensor": "whether a tensor has no data",
    "torch.ops.aten._local_scalar_dense.default": "the value that a script reads",
    "ddp._parameters": "a module's parameters are replaced by ones without data",
    "ddp._buffers": "a module's buffers are replaced by ones without data",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "a step that reads values",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "a shape that depends on data",
    "torch.distributed._tools.mem_tracker.MemTracker._pre_fw_hook": "root modules called twice",
    "torch.distributed._tools.mem_tracker.MemTracker._update_peak_stats": "half of the time",
    "torch.distributed._tools.mem_tracker.MemTracker._track_module_params_and_buffers": "frozen",
    "tracker._param_to_grad_hook_handles": "frozen parameters have no hooks for gradients",
    "torch.distributed._tools.mod_tracker.ModTracker": "the module that runs",
    # Samples that are divided over ranks (parallel/spatial)
    "torch.Tensor._make_wrapper_subclass": "a tensor with the shape of the whole and a part's data",
    "torch._C._nn.pad": "functions of torch.nn.functional as a wrapper tensor gets them",
    # Layers that are divided over ranks (parallel/tensor)
    "torch.nn.modules.conv._ConvNd": "convolutions of all dims",
    "torch.nn.modules.conv._ConvTransposeNd": "transposed convolutions of all dims",
    "lstm._flat_weights": "the weights with which a recurrent layer computes",
    # Autograd (record/hooks)
    "torch.autograd.graph._engine_run_backward": "wrapped: begin and end of a backward pass",
    "torch._C._current_graph_task_id": "whether a collective is called inside a backward pass",
    "torch.autograd.Variable._execution_engine": "a callback at the end of a backward pass",
    "torch.autograd._enable_record_function": "whether the profiler records functions",
    "torch._C._autograd.DeviceType": "events of the profiler that are kernels",
    "torch._C._autograd._profiler_enabled": "the user's own profiler is not disturbed",
    "torch.autograd.profiler.profile._prepare_trace": "wrapped: the user profiles a run",
    "torch.utils._python_dispatch.TorchDispatchMode": "counts the operators of a sampled step",
    "torch.utils._python_dispatch._get_current_dispatch_mode": "whether another mode is active",
    "torch.ops.aten.add.Tensor._overloadpacket": "FLOPs of an operator, in all its overloads",
    "torch._C._current_autograd_node": "which forward an operator of a backward belongs to",
    "torch._C._autograd._get_sequence_nr": "the number of the autograd node of a forward",
    "node._sequence_nr": "the number of an autograd node",
    "torch._inductor.aoti_compile_and_package": "paceline export: the AOTInductor backend",
    "torch._C._WeakTensorRef": "whether a tensor still exists",
    "torch.ops.aten._cudnn_rnn": "FLOPs of an operator",
    "torch.ops.aten._cudnn_rnn_backward": "FLOPs of an operator",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "FLOPs of an operator",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "FLOPs of an operator",
    "sparse._indices": "bytes of a sparse tensor",
    "sparse._values": "bytes of a sparse tensor",
    "torch._foreach_norm": "norms of all gradients in one kernel",
    "torch._foreach_add_": "a step of LARS or LAMB in few kernels, as those that follow",
    "torch._foreach_addcdiv_": "the same",
    "torch._foreach_addcmul_": "the same",
    "torch._foreach_lerp_": "the same",
    "torch._foreach_mul_": "the same",
    "torch._foreach_sqrt": "the same",
    "torch._foreach_sub_": "the same",
    "torch.nn.modules.batchnorm._LazyNormBase": "a layer without parameters yet",
    "torch._foreach_copy_": "Horovod's results out of the buffer of fused tensors",
    "torch._utils._flatten_dense_tensors": "Horovod's tensors in one buffer",
    "torch._utils._unflatten_dense_tensors": "parts of this buffer, in the shapes of the tensors",
    "torch.utils._pytree.tree_flatten": "tensors in the state of an optimizer",
    "torch.utils._pytree.tree_unflatten": "this state again",
    # Modules and compilation
    "torch._C._is_tracing": "torch.jit.trace runs the model: not a forward of the training",
    "torch._C.DisableTorchFunction": "a subclass of Tensor does not see how a batch is counted",
    "torch.nn.Module._call_impl": "a hooked module that is not compiled",
    "torch.nn.Module._compiled_call_impl": "whether a module is compiled",
    "torch._dynamo.eval_frame.OptimizedModule": "what torch.compile returns: it has _orig_mod",
    "compiled._orig_mod": "the module inside torch.compile",
    "function._torchdynamo_inline": "what torch.compile traces in place of a function with a hook",
    "torch._dynamo.utils": "hooks that torch.compile may trace through",
    "torch._dynamo.trace_rules.add": "torch.compile does not trace into Paceline",
    "torch._dynamo.variables.nn_module": "hooks that torch.compile may trace through",
    "torch.utils._pytree.tree_map": "tensors of nested batches",
    "torch.utils._pytree.tree_map_only": "tensors of nested arguments",
    "torch.utils._pytree.tree_leaves": "tensors of nested batches",
    "torch.utils._pytree.TreeSpec": "type of the structure of arguments",
    "torch.nn.modules.batchnorm._NormBase": "layers with running statistics",
    # Pipelines (parallel/pipeline)
    "torch.distributed.pipelining._backward.stage_backward_input": "backward in two parts",
    "torch.distributed.pipelining._backward.stage_backward_weight": "backward in two parts",
    "parameter._is_view": "outputs of a stage that cannot be detached in place",
    # DistributedDataParallel (parallel/replicated, comm/tune/tuner.py, knobs)
    "ddp._ddp_init_helper": "other buckets for a model that has begun to train",
    "ddp._build_params_for_reducer": "other buckets, and buckets in a fixed order",
    "ddp._build_debug_param_to_name_mapping": "other buckets",
    "ddp._comm_hooks": "the user's own communication hook is kept",
    "ddp._delay_all_reduce_params": "other buckets are not possible with it",
    "ddp._join_config": "other buckets are not possible inside join()",
    "ddp._use_python_reducer": "other buckets are not possible with it",
    "ddp._has_rebuilt_buckets": "whether DDP has its final buckets",
    "ddp._sync_buffers": "broadcast of buffers",
    "ddp._get_ddp_logging_data": "bytes of unused parameters",
    "ddp._inside_ddp_forward": "a method of the model that runs in place of forward",
    "state._metadata": "versions of the parts of a module in its state",
    "parameter._version": "whether a backward has added to a gradient",
    "ddp._post_forward": "wrapped: search for unused parameters, timed",
    "ddp.reducer._push_all_rebuilt_params": "final buckets before the first step",
    "ddp.reducer._rebuild_buckets": "final buckets before the first step",
    "ddp.reducer._remove_autograd_hooks": "the reducer of the buckets before",
    "ddp.reducer._set_static_graph": "other buckets with a static graph",
    "ddp.logger._set_static_graph": "other buckets with a static graph",
    # Sharded layouts (parallel/sharded): FSDP2
    f"{FSDP}_fsdp_common.TrainingState": "whether a module is inside its forward or backward",
    f"{FSDP}_fsdp_param.FSDPParam.accumulate_unsharded_grad_if_needed": "whole gradients",
    f"{FSDP}_fsdp_param.FSDPParam.init_unsharded_param": "wrapped: gradients before a reduction",
    f"{FSDP}_fully_shard.FSDPModule.set_requires_gradient_sync": "wrapped: its line",
    f"{FSDP}_fsdp_param_group.FSDPParamGroup": "parameters that are gathered together",
    f"{FSDP}_fsdp_param_group.FSDPParamGroup.unshard": "wrapped: the block of a gather",
    f"{FSDP}_fsdp_param_group.FSDPParamGroup.post_backward": "wrapped: the block of a reduction",
    "fsdp_group._all_gather_result": "whether a block's gather was launched",
    "fsdp_parameter._param_fqn": "name of a parameter, where ranks exchange different blocks",
    "fsdp_state._root_post_backward_final_callback": "wrapped: ranks compare the blocks they used",
    "fsdp._get_fsdp_state": "the state of a sharded module",
    "fsdp_state._lazy_init": "wrapped: knobs of a sharded model, before its first forward",
    "fsdp_state._is_root": "whether a sharded module is the model",
    "fsdp_state._modules": "the modules of a state",
    "fsdp._set_unshard_async_op": "gathers that overlap with computing on a CPU",
    "fsdp_state._register_pre_backward_hook": "wrapped: tensors of which a rank has a part",
    "fsdp_group._register_post_backward_hook": "wrapped: tensors of which a rank has a part",
    "fsdp_group._module_fqn": "name of a block, in the record",
    "fsdp_state._training_state": "whether a method is called inside a forward",
    "fsdp_group._partial_reduce_output": "gradients that wait for the exchange between hosts",
    "fsdp_group._training_state": "the block whose gradients are exchanged",
    "fsdp_group.fsdp_params": "the parameters of a block, in the order of their exchange",
    "fsdp_parameter._unsharded_param": "a parameter's gradient before its exchange",
    "fsdp_parameter._setattr_on_modules": "shards of a deferred model, also in tied modules",
    "fsdp_parameter.reset_sharded_param": "shards of a deferred model, padded",
    "fsdp_parameter.padded_sharded_param_size": "position of a gradient in an exchange",
    "shard._local_tensor": "a shard's memory",
    "shard._spec": "a state of a shard in the memory of the host",
    "scheduled._opt_called": "schedulers see that an offloaded optimizer has stepped",
    "scheduler._last_lr": "the rates of a schedule that continues with another first rate",
    "scheduled.step._wrapped_by_lr_sched": "schedulers accept an offloaded optimizer's step",
    f"{BOUND}._broadcast_coalesced": "broadcast of buffers and parameters",
    "torch.nn.utils.clip_grad._get_total_norm": "wrapped: the norm of a divided model is refused",
    "torch.distributed.utils._sync_module_states": "rank 0's parameters and buffers",
    # Parameters (parallel/distribution_check.py)
    "parameter._backward_hooks": "whether the script handles the gradient itself",
    "parameter._post_accumulate_grad_hooks": "whether the script handles the gradient itself",
    # Recomputation and deferred construction (parallel)
    "torch.UntypedStorage._cdata": "which tensors share a storage, also on the device meta",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": "buffers of a second forward",
    "torch.utils._python_dispatch._disable_current_modes": "reads the state while it records",
    "torch._C._storage_Use_Count": "whether a deferred tensor still exists",
    "torch._C._swap_tensor_impl": "values of a deferred parameter, which remains the same object",
    "torch.nn.init._no_grad_trunc_normal_": "draws as one operator while a model is deferred",
    # Loss scaling (optim/gradients.py)
    "torch.amp.GradScaler._found_inf_per_device": "whether a step was skipped",
    "torch._amp_foreach_non_finite_check_and_unscale_": "gradients of float16, whole and shards",
    "scaler._device": "device of the scale",
    "scaler._per_optimizer_states": "ranks agree on a step that is skipped",
    "scaler._scale": "scale of the losses of a step",
    # Facts for verify (observe)
    "torch.nn.modules.batchnorm._BatchNorm": "layers with statistics of a batch",
    "scaler._growth_tracker": "steps since the loss scale has changed",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "place of a shard",
    # DataLoader (data/loading/loader.py, record)
    "torch.utils.data.dataloader._BaseDataLoaderIter": "base of a Loader's iterator; wrapped",
    "torch.utils.data._utils.worker._worker_loop": "wrapped: a worker's stack is sampled",
    "iterator._dataset": "the dataset of a loader, for experiments and warnings",
    "iterator._index_sampler": "whether a loader gives each rank all samples",
    "iterator._num_yielded": "batches that a loader has returned",
    "iterator._base_seed": "seed of a sampler that draws its order at random",
    "iterator._next_data": "overridden in a Loader's iterator",
    "iterator._next_index": "wrapped by verify: the indices of batches, also of those left out",
    "iterator._sampler_iter": "the rest of the indices of a pass that the script has left",
    "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch": "wrapped: random draws of samples",
    "torch.utils.data._utils.fetch._IterableDatasetFetcher.fetch": "the same",
}
# Private names that belong to Python and the netCDF library.
OTHERS = {
    *("_current_frames", "_getframe", "_exit", "_run_exitfuncs", "_fields"),
    *("_grp",),
    *("_trial_id",),  # of Optuna: a trial of its journal is continued
    *("_DataFetcher", "_TrainingEpochLoop", "_should_check_val_fx"),  # of Lightning
    *("_accumulated_gradients", "_get_variable_index", "_learning_rate"),  # of Keras
    "_reduction_axes",  # of Keras
    *("_get_control_flow_context",),  # of TensorFlow
}
# Only users and other libraries set these on a DDP model, or a step with a static graph does; FSDP1
# on its parameters.
OPTIONAL = {
    *("_ddp_params_and_buffers_to_ignore", "_static_graph_delay_allreduce_enqueued"),
    *(
        "_fsdp_flattened",
        "_is_flat_param",
        "_bucket_config",
        "_forward_hooks",
        "_forward_pre_hooks",
    ),
    *("_fsdp_param_groups", "_fsdp_param_group"),  # since PyTorch 2.12, and before
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Return the objects that names of rows begin with."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    fsdp = dist.fsdp.fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
    fsdp(torch.ones(1, 2))
    (fsdp_group,) = groups_of(fsdp._get_fsdp_state())
    scheduled = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(scheduled, 1)
    scheduled.step()
    yield {
        "scheduled": scheduled,
        "scheduler": scheduler,
        "tracker": mem_tracker.MemTracker(),
        "fsdp": fsdp,
        "fsdp_state": fsdp._get_fsdp_state(),
        "fsdp_group": fsdp_group,
        "fsdp_parameter": fsdp_group.fsdp_params[0],
        "shard": fsdp_group.fsdp_params[0].sharded_param,
        "group": dist.distributed_c10d._get_default_group(),
        "ddp": ddp,
        "iterator": iter(DataLoader([1, 2])),
        "lstm": torch.nn.LSTM(1, 1),
        "scaler": torch.amp.GradScaler("cpu"),
        "parameter": torch.nn.Parameter(torch.ones(1)),
        "state": torch.nn.Linear(2, 2).state_dict(),
        "node": (torch.ones(1, requires_grad=True) + 1).grad_fn,
        "sparse": torch.eye(2).to_sparse(),
        "compiled": torch.compile(torch.nn.Linear(2, 2)),
        "function": torch.compile(lambda: None),
    }
    dist.destroy_process_group()


def resolve(name, objects):
    """Return the object with a row's name.

    Raises AttributeError or ImportError if it does not exist.
    """
    first, *rest = name.split(".")
    if first in objects:
        found = objects[first]
    else:
        at = len(rest) + 1
        while True:
            try:
                found = importlib.import_module(".".join([first, *rest][:at]))
                break
            except ModuleNotFoundError:
                at -= 1
        rest = [first, *rest][at:]
    for part in rest:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", INTERFACES)
def test_private_torch_interface_exists(name, objects):
    try:
        resolve(name, objects)
    except (AttributeError, ImportError) as error:
        pytest.fail(f"{name}: {error}; used for: {INTERFACES[name]}; by {users_of(name)}")


def test_new_process_group_helper_signature():
    made = inspect.signature(dist.distributed_c10d._new_process_group_helper)
    assert list(made.parameters)[:6] == [
        *("group_size", "group_rank", "global_ranks_in_group"),
        *("backend", "store", "group_name"),
    ]


def test_ddp_init_helper_signature():
    made = inspect.signature(DistributedDataParallel._ddp_init_helper)
    assert list(made.parameters)[1:5] == [
        *("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"),
    ]


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names():
    """Return private names that the source uses but does not define, with the files that use them.

    A name is the last part of a dotted name.
    """
    own = set()
    used = defaultdict(set)
    for file, text in texts(SOURCE):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                own.add(node.attr)
            for name in names_in(node):
                used[name].add(file)
    return {
        name: files
        for name, files in used.items()
        if name not in own and not name.startswith("_paceline")
    }


def names_in(node):
    """Return private names that a node of the syntax tree uses."""
    if isinstance(node, ast.Attribute):
        return [node.attr] if is_private(node.attr) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        private = any(map(is_private, (node.module or "").split(".")))
        return [alias.name for alias in node.names if private or is_private(alias.name)]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return []
    if node.func.id in ("getattr", "hasattr", "setattr"):
        name = getattr(node.args[1], "value", None)
        return [name] if isinstance(name, str) and is_private(name) else []
    return []


def users_of(name):
    return ", ".join(sorted(private_names().get(name.rpartition(".")[2], ()))) or "a string"


def test_table_is_complete():
    listed = {part for name in INTERFACES for part in name.split(".")} | OTHERS | OPTIONAL
    assert {n: files for n, files in private_names().items() if n not in listed} == {}


def test_new_use_of_private_interface_is_detected(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "new.py").write_text("import torch\ntorch._C._a_new_one()\n")
    assert "_a_new_one" in private_names()
