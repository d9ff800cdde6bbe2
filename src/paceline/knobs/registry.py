"""The table of knobs: everything that Paceline can change or propose to change in a training job.

A knob is set without an edit of the script if that is safe; otherwise the script must be edited.
``paceline diagnose`` proposes knobs, ``--try`` measures them, and ``paceline run --settings`` sets
them.
"""

import json
import os
from functools import partial
from importlib import import_module

from ..cost.layout import SCHEDULES
from . import layouts, learning_rate, loading, model, process
from .edits import EDITS
from .knob import (
    ALL,
    FORMULA,
    HALF,
    LADDER,
    ON,
    RECORD,
    Choice,
    KnobResult,
    LayoutText,
    ModuleNames,
    Range,
    Share,
    Tried,
    request,
)
from .knob import COMPUTING as COMPUTING
from .knob import Knob as Knob

# Each is a communication hook, and DDP accepts only one.
LESS = ("compress-bf16", "compress-fp16", "compress-powersgd", "compress-topk", "average-every")

VARIABLE = "PACELINE_SETTINGS"  # passes knobs and their values to a rank, as JSON

_HAS_STAGES = r"\bpp\d|\bpp=|\.distribute\("
_SHARDS = r"\bfully_shard\(|\.distribute\("
_LOADING = ("input-preprocessing", "input-waiting", "input-small-files", "input-bandwidth", "input")

KNOBS: dict[str, Knob] = {
    "loader-workers": Knob(
        "number of loader worker processes for each rank",
        _LOADING,
        "DataLoader(num_workers={value}, persistent_workers=True)",
        loading.workers,
        Range(1, 64),
        r"\bDataLoader\(",
        "memory for a copy of the dataset's Python objects in each process; different "
        "random augmentations",
    ),
    "persistent-workers": Knob(
        "loader workers continue in the next epoch",
        ("loader-start", *_LOADING),
        "DataLoader(persistent_workers=True)",
        loading.persistent,
        ON,
        r"\bDataLoader\(",
        "memory of the workers between epochs",
    ),
    "prefetch": Knob(
        "number of batches that each loader worker prefetches",
        _LOADING,
        "DataLoader(prefetch_factor={value})",
        loading.prefetch,
        Range(1, 64),
        r"\bDataLoader\(",
        "memory for these batches",
    ),
    "global-batch": Knob(
        "samples of a batch on all ranks together; the learning rate is not changed",
        (),
        "world.shard(loader, global_batch={value}), or DataLoader(batch_size={value} / ranks)",
        loading.global_batch,
        Range(1, 1 << 40),
        r"\bDataLoader\(|\bshard\(",
        numbers=True,
    ),
    "accumulate-batches": Knob(
        "factor of the number of batches whose gradients world.distribute accumulates for a step",
        (),
        "world.distribute(model, optimizer, accumulate={value})",
        request,
        Range(1, 4096),
        r"\bdistribute\(",
        numbers=True,
    ),
    "learning-rate-factor": Knob(
        "factor of the learning rates of all optimizers, in every step",
        (),
        "optimizer.param_groups[i]['lr'] *= {value}, and the same in the base rates of schedulers",
        learning_rate.factor,
        Range(1e-6, 1e6, whole=False),
        r"\blr=",
        numbers=True,
    ),
    "pin-memory": Knob(
        "batches are in pinned memory, from which a GPU copies asynchronously",
        _LOADING,
        "DataLoader(pin_memory=True), and .to(device, non_blocking=True)",
        loading.pinned,
        ON,
        r"\bDataLoader\(",
        "node memory that cannot be swapped",
    ),
    "bucket-mb": Knob(
        "size of DDP's gradient buckets, in MiB",
        ("bucket-size",),
        "DistributedDataParallel(bucket_cap_mb={value}); paceline run --tune-exchange finds the "
        "best value for a script",
        partial(model.construct, "bucket_cap_mb"),
        Range(0.1, 4096, whole=False),
        r"\b(DistributedDataParallel|DDP)\(",
        saves=Tried(25.0),
    ),
    "exchange": Knob(
        'backend of collectives on CPUs: "paceline" uses shared memory within a node, and one '
        "exchange per node between nodes",
        ("exchange-bandwidth", "exchange-latency", "bucket-size", "no-overlap", "sharded-exchange"),
        'init_process_group("{value}") after import paceline, or paceline run --exchange {value}',
        "comm.replace_gloo:exchange",
        Choice(("paceline", "gloo")),
        r"init_process_group\(",
        "16 MiB of memory on each node",
    ),
    "algorithm": Knob(
        'all-reduce algorithm between nodes for all message sizes; "sockets" first reduces within '
        "each CPU socket",
        ("exchange-bandwidth", "exchange-latency"),
        "PACELINE_ALGORITHM={value} in the environment",
        "comm.replace_gloo:algorithm",
        Choice(("direct", "doubling", "halving", "ring", "racks", "tree", "sockets")),
        costs="time for messages of other sizes",
    ),
    "fusion-mb": Knob(
        "maximum size of tensors that Horovod exchanges together, in MiB",
        ("exchange-latency", "exchange-bandwidth", "no-overlap"),
        "paceline horovodrun --fusion-threshold-mb {value}, or HOROVOD_FUSION_THRESHOLD in bytes",
        "compat.horovod.knobs:fusion_threshold",
        Range(0, 4096, whole=False),
        r"\bDistributedOptimizer\(",
    ),
    "cycle-ms": Knob(
        "time in which Horovod collects tensors before it exchanges them, in ms",
        ("exchange-latency", "exchange-bandwidth", "no-overlap"),
        "HOROVOD_CYCLE_TIME={value} in the environment",
        "compat.horovod.knobs:cycle_time",
        Range(0, 1000, whole=False),
        r"\bDistributedOptimizer\(",
    ),
    "nccl-algorithm": Knob(
        "algorithm of NCCL's collectives, instead of the one that NCCL selects",
        ("exchange-bandwidth", "exchange-latency"),
        "NCCL_ALGO={value} in the environment",
        partial(process.nccl, "NCCL_ALGO"),
        Choice(("Ring", "Tree")),
        costs="time for messages of other sizes; an error if NCCL does not have this algorithm",
    ),
    "nccl-protocol": Knob(
        "protocol of NCCL's collectives, instead of the one that NCCL selects",
        ("exchange-bandwidth", "exchange-latency"),
        "NCCL_PROTO={value} in the environment",
        partial(process.nccl, "NCCL_PROTO"),
        Choice(("LL", "LL128", "Simple")),
        costs="time for messages of other sizes; an error if NCCL does not have this protocol",
    ),
    "nccl-channels": Knob(
        "minimum number of NCCL's channels",
        ("exchange-bandwidth",),
        "NCCL_MIN_NCHANNELS={value} in the environment",
        partial(process.nccl, "NCCL_MIN_NCHANNELS"),
        Range(1, 64),
        costs="multiprocessors of the GPU, which then do not compute",
    ),
    "gradient-views": Knob(
        "gradients are views of DDP's buckets, without copies",
        ("exchange-bandwidth", "bucket-size"),
        "DistributedDataParallel(gradient_as_bucket_view=True)",
        partial(model.construct, "gradient_as_bucket_view"),
        ON,
        r"\b(DistributedDataParallel|DDP)\(",
        saves=Tried(),
    ),
    "unused-search-off": Knob(
        "DDP does not search for unused parameters",
        ("unused-parameter-search",),
        "DistributedDataParallel(find_unused_parameters=False)",
        model.no_search,
        ON,
        r"find_unused_parameters",
        "an error as soon as a parameter is unused",
        saves=Share(ALL, RECORD),
    ),
    "buffers-off": Knob(
        "DDP does not broadcast the model's buffers before each forward",
        ("buffer-broadcast",),
        "set broadcast_buffers = False on the model that DistributedDataParallel() returns",
        model.no_buffers,
        ON,
        r"\b(DistributedDataParallel|DDP)\(",
        "running statistics of BatchNorm differ between ranks: each rank evaluates with those of "
        "its own batches, and a checkpoint has those of rank 0",
        numbers=True,
        saves=Share(ALL, RECORD),
    ),
    "accumulate-locally": Knob(
        "only the last backward of an optimizer step synchronizes gradients",
        ("accumulation-exchange",),
        "with model.no_sync(): around all backwards of an optimizer step except the last",
        model.synchronize_last,
        ON,
        r"\.backward\(",
    ),
    "compress-bf16": Knob(
        "DDP sends gradients as bfloat16, half of the bytes",
        ("exchange-bandwidth",),
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        partial(model.compress, "bf16"),
        ON,
        r"\b(DistributedDataParallel|DDP)\(",
        "precision: gradients are rounded to 8 significant bits",
        numbers=True,
        excludes=LESS,
        saves=Tried(),
    ),
    "compress-fp16": Knob(
        "DDP sends gradients as float16, half of the bytes",
        ("exchange-bandwidth",),
        "model.register_comm_hook(None, default_hooks.fp16_compress_hook)",
        partial(model.compress, "fp16"),
        ON,
        r"\b(DistributedDataParallel|DDP)\(",
        "precision: gradients are rounded to 11 significant bits, and those above 65,504 overflow",
        numbers=True,
        excludes=LESS,
        saves=Tried(),
    ),
    "compress-powersgd": Knob(
        "rank of the low-rank approximation of gradient matrices (PowerSGD); the rest is "
        "sent later",
        ("exchange-bandwidth",),
        "model.register_comm_hook(PowerSGDState(None, {value}, 4), powerSGD_hook)",
        "comm.compress:powersgd",
        Range(1, 256),
        r"\b(DistributedDataParallel|DDP)\(",
        "memory of the size of the gradients, and steps until the rest arrives",
        numbers=True,
        excludes=LESS,
    ),
    "compress-topk": Knob(
        "share of the gradients that is sent, the largest ones; the rest is sent later",
        ("exchange-bandwidth",),
        "model.register_comm_hook(TopK({value}, group), topk_hook) of paceline.comm.compress",
        "comm.compress:topk",
        Range(1e-5, 1, whole=False),
        r"\b(DistributedDataParallel|DDP)\(",
        "memory of the size of the gradients, and steps until the rest arrives",
        numbers=True,
        excludes=LESS,
    ),
    "average-every": Knob(
        "number of steps between averages of the ranks' parameters, without gradient "
        "synchronization (local SGD)",
        ("exchange-bandwidth", "exchange-latency", "bucket-size"),
        "post_localSGD_hook, and PeriodicModelAverager(period={value}) after each step",
        "optim.local_sgd:every",
        Range(1, 10_000),
        r"\b(DistributedDataParallel|DDP)\(",
        "models that differ between averages, also if a rank evaluates or saves its model",
        numbers=True,
        excludes=LESS,
    ),
    "threads": Knob(
        "number of compute threads for each rank; overrides the script",
        ("too-many-threads",),
        "torch.set_num_threads({value}), or paceline run --threads {value}",
        process.threads,
        Range(1, 1024),
        r"set_num_threads\(|OMP_NUM_THREADS",
    ),
    "own-binding-off": Knob(
        "Paceline ignores the core binding that the script sets; the launcher's binding applies",
        ("binding",),
        "remove os.sched_setaffinity, and use paceline run --bind core",
        process.unbound,
        ON,
        r"sched_setaffinity|cpu_affinity",
    ),
    "keep-memory": Knob(
        "glibc keeps freed memory for later allocations (mallopt)",
        ("allocator",),
        "set MALLOC_TOP_PAD_, MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ in the environment",
        process.kept,
        ON,
        costs="memory of a rank stays at its peak",
        excludes=("jemalloc",),
    ),
    "jemalloc": Knob(
        "jemalloc replaces the memory allocator, and keeps freed memory",
        ("allocator",),
        "LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1",
        process.jemalloc,
        ON,
        costs="memory of a rank stays at its peak; each rank starts a separate interpreter",
        excludes=("keep-memory",),
    ),
    "huge-pages": Knob(
        "large tensors use huge pages: 512 times fewer page faults",
        ("allocator",),
        "THP_MEM_ALLOC_ENABLE=1 in the environment",
        process.huge_pages,
        ON,
        costs="memory of pages that tensors fill only in part",
        saves=Tried(),
    ),
    "layout": Knob(
        "layout of the models of world.distribute over the ranks",
        (),
        "world.distribute(model, optimizer, layout='{value}')",
        layouts.set_layout,
        LayoutText(),
        r"\bdistribute\(",
        "with a sharded layout, communication for parameters",
    ),
    "micro-batches": Knob(
        "number of micro-batches into which a pipeline divides a batch",
        ("pipeline-bubble",),
        "set micro-batches={value} in the layout",
        layouts.set_pipeline_option,
        Range(1, 4096),
        _HAS_STAGES,
        "smaller micro-batches use a core or a GPU less well; batch normalization normalizes "
        "fewer samples",
    ),
    "pipeline-schedule": Knob(
        "order of the forwards and backwards in a pipeline",
        ("pipeline-bubble",),
        "set schedule={value} in the layout, or schedule=auto, which measures it",
        layouts.set_pipeline_option,
        Choice(SCHEDULES),
        _HAS_STAGES,
        "memory for the gradients of micro-batches whose parameters' part comes later",
    ),
    "pipeline-balance": Knob(
        "names of the modules with which the stages of a pipeline after the first one begin",
        ("pipeline-bubble",),
        "world.distribute(model, optimizer, balance='{value}')",
        layouts.set_pipeline_option,
        ModuleNames(),
        _HAS_STAGES,
    ),
    "sequence-split": Knob(
        "with a tensor axis, norms and dropout compute with parts of the tokens: reduce-scatters "
        "and all-gathers in place of all-reduces",
        ("tensor-exchange",),
        "paceline.Layout(tp=2, rules=rules), with '*norm*': 'sequence' and '*dropout*': 'sequence' "
        "among the rules",
        "parallel.tensor.strategy:set_sequence",
        ON,
        r"\btp\d|\btp=|\.distribute\(",
        "small sums for the gradients of norms, and of biases of row layers",
    ),
    "channels-last": Knob(
        "convolutions get weights and images in the channels-last memory format",
        ("layout",),
        "model.to(memory_format=torch.channels_last), and the same for the images",
        model.channels_last,
        ON,
        saves=Share(ALL, LADDER),
    ),
    "autocast-bf16": Knob(
        "forward and backward compute in bfloat16 where that is safe (autocast)",
        (COMPUTING,),
        "with torch.autocast(device, torch.bfloat16): around the forward",
        model.autocast,
        ON,
        r"\bmodel\(",
        "precision: matrices are rounded to 8 significant bits",
        numbers=True,
        excludes=("matmul-precision",),
    ),
    "matmul-precision": Knob(
        "products of float32 matrices use fewer bits (TF32 on GPUs)",
        (COMPUTING,),
        'torch.set_float32_matmul_precision("{value}")',
        model.products,
        Choice(("high", "medium")),
        r"set_float32_matmul_precision",
        'precision: factors are rounded to 11 ("high") or 8 ("medium") significant bits',
        numbers=True,
        excludes=("autocast-bf16",),
    ),
    "compile": Knob(
        "the model is compiled: adjacent operations are fused",
        (COMPUTING,),
        "model.compile()",
        model.compiled,
        ON,
        costs="up to minutes in the first step, and again for inputs of other shapes",
    ),
    "float32": Knob(
        "float32 instead of float64",
        ("precision",),
        "use float32 where its precision is sufficient",
        looks_for=r"float64|\.double\(|torch\.double",
        numbers=True,
        saves=Share(ALL, FORMULA),
    ),
    "ddp": Knob(
        "gradients are synchronized during the backward",
        ("no-overlap",),
        "torch.nn.parallel.DistributedDataParallel, or world.distribute(model, optimizer)",
        looks_for=r"\ball_reduce\w*\(",
    ),
    "script-beside": Knob(
        "the script does its other work less often, in another process or in a thread",
        ("script",),
        "{value}",
        effort=2,
    ),
    "threads-beside": Knob(
        "another process does the work of the other Python thread",
        ("interpreter",),
        "use multiprocessing instead of threading, or a library that releases the GIL",
        looks_for=r"Thread\(",
        effort=3,
        saves=Share(ALL, RECORD),
    ),
    "validate-on-all": Knob(
        "each rank validates a part of the data",
        ("validation-on-one-rank", "validation"),
        "give each rank a part of the samples: for x, y in world.batches(world.shard(loader)), and "
        "world.log over all ranks",
        looks_for=r"\.eval\(\)|no_grad|inference_mode",
        effort=2,
    ),
    "async-checkpoint": Knob(
        "checkpoints are written during the training",
        ("checkpoint", "checkpoint-on-one-rank"),
        "torch.distributed.checkpoint.async_save, or world.epochs(checkpoint=...)",
        looks_for=r"\bsave\w*\(",
        costs="memory for a copy of the state",
        saves=Share(ALL, LADDER),
    ),
    "rarer-checkpoint": Knob(
        "checkpoints are written half as often",
        ("checkpoint", "checkpoint-on-one-rank"),
        "save half as often: a failure then costs at most twice as many steps (world.epochs also "
        "saves before a time limit)",
        looks_for=r"\bsave\w*\(",
        costs="more steps to repeat after a failure",
        saves=Share(HALF, LADDER),
    ),
    "larger-batch": Knob(
        "batches of twice the size, with half as many gradient synchronizations per sample",
        ("exchange-bandwidth", "exchange-latency", "no-overlap", "sharded-exchange", "fixed-cost"),
        "double batch_size, and multiply the learning rate by 2 (SGD) or 1.4 (Adam), with warm-up",
        looks_for=r"\bDataLoader\(|batch_size",
        costs="more samples until the same loss if batches exceed the gradient noise scale; memory "
        "for activations",
        numbers=True,
        saves=Share(HALF, FORMULA),
        is_edited_elsewhere=True,
    ),
    "pack": Knob(
        "samples are in a few large files, and threads make the batches",
        ("input-small-files",),
        'paceline pack FOLDER PACKED, and paceline.data.Loader("PACKED", ...) for DataLoader',
        looks_for=r"\bDataLoader\(",
        costs="space for a second copy of the samples",
        effort=3,
        saves=Share(HALF, FORMULA),
    ),
    "stage": Knob(
        "samples are on node-local storage",
        ("input-bandwidth",),
        "paceline pack, and paceline stage PACKED on each node, which copies to node-local storage "
        "(PACELINE_STAGE); paceline check --data PACKED predicts the gain",
        looks_for=r"\bDataLoader\(|\bLoader\(",
        costs="space on each node",
        effort=3,
    ),
    "offline": Knob(
        "preprocessing that is the same in each epoch is done once",
        ("input-preprocessing",),
        "paceline pack --apply MODULE:FUNCTION for transforms without random numbers; paceline "
        "check --data DATASET --transform MODULE:FUNCTION measures their time per sample",
        looks_for=r"\bDataLoader\(|\bLoader\(",
        costs="space for a second copy of the samples",
        effort=3,
        saves=Share(ALL, RECORD, is_limit=True),
    ),
    "edit-line": Knob(
        "the line that takes the time is changed, or is executed less often",
        ("line", "slow-rank"),
        "{value}",
    ),
    "leave-rank-out": Knob(
        "the device of the slow rank is not used",
        ("slow-rank",),
        "paceline run with one rank fewer; the global batch becomes smaller",
        numbers=True,
        effort=2,
    ),
    "equal-batches": Knob(
        "batches of the ranks have the same number of elements",
        ("uneven-data",),
        "use a sampler that puts samples of similar length into the same step (bucketing)",
        looks_for=r"Sampler\(|\bDataLoader\(",
        numbers=True,
        effort=3,
        saves=Share(ALL, LADDER),
    ),
    "leave-host-out": Knob(
        "the slow node is not used",
        ("slow-host",),
        "paceline run -H with the other hosts; the global batch becomes smaller",
        numbers=True,
        effort=3,
    ),
    "sharded-prefetch": Knob(
        "number of blocks of a sharded model that are gathered ahead, in forward and in backward",
        ("sharded-exchange",),
        "set_modules_to_forward_prefetch and set_modules_to_backward_prefetch of each block, with "
        "the next {value} blocks",
        "parallel.sharded.prefetch:set_prefetch",
        Range(1, 16),
        _SHARDS,
        "memory for these blocks; a gather without use for each block that a forward leaves out",
    ),
    "sharded-keep-gathered": Knob(
        "blocks of a sharded model stay gathered between forward and backward",
        ("sharded-exchange",),
        'fully_shard(reshard_after_forward=False), or world.distribute(layout="zero2")',
        "parallel.sharded.prefetch:set_keep_gathered",
        ON,
        _SHARDS,
        "memory for all parameters on each rank",
    ),
    "sharded-blocks": Knob(
        "blocks of a sharded model have another size",
        ("sharded-exchange",),
        "{value}",
        looks_for=_SHARDS,
        is_edited_elsewhere=True,
    ),
    "data-parallel": Knob(
        "the model is not sharded",
        ("sharded-exchange",),
        "{value}",
        looks_for=_SHARDS,
        costs="memory for parameters, gradients and optimizer states of the whole model on each "
        "rank",
        effort=2,
        is_edited_elsewhere=True,
    ),
    **EDITS,
}


def apply_knobs() -> None:
    """Apply the settings of this process; called after the recorder has installed its hooks."""
    for name, value in json.loads(os.environ.get(VARIABLE) or "{}").items():
        hook = KNOBS[name].hook
        if isinstance(hook, str):
            module, _, function = hook.partition(":")
            hook = getattr(import_module(f"paceline.{module}"), function)
        assert hook is not None
        hook(value, KnobResult(name))
