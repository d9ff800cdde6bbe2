"""The table of knobs: everything that Paceline can change or propose to change in a training job.

A knob is set without an edit of the script if that is safe; otherwise the script must be edited.
``paceline diagnose`` proposes knobs, ``--try`` measures them, and ``paceline run --settings`` sets
them.
"""

from dataclasses import dataclass

from .value_types import ON, Choice, Range, Switch

# Each is a communication hook, and DDP accepts only one.
LESS = ("compress-bf16", "compress-fp16", "compress-powersgd", "compress-topk", "average-every")

VARIABLE = "PACELINE_SETTINGS"  # passes knobs and their values to a rank, as JSON


@dataclass(frozen=True)
class Knob:
    """One knob.

    Attributes:
        does: What the knob changes, for the user.
        answers: Ids of the causes in ``paceline diagnose`` that it may remove, or ``COMPUTING``.
        edit: The equivalent edit of the script.
        hook: module:function under ``paceline`` that sets the knob in a rank; empty if the script
            must be edited.
        value: Values that the knob accepts; None if the script must be edited.
        looks_for: Regular expression that finds the line of the script to edit.
        costs: Possible costs, for the user.
        numbers: Whether results change by more than the order of summation causes.
        excludes: Names of knobs that cannot be set together with this one.
    """

    does: str
    answers: tuple[str, ...]
    edit: str
    hook: str = ""
    value: Range | Switch | Choice | None = None
    looks_for: str = ""
    costs: str = ""
    numbers: bool = False
    excludes: tuple[str, ...] = ()


COMPUTING = "computing"  # not a cause: applies if no cause limits the training
_LOADING = ("input-preprocessing", "input-waiting", "input-small-files", "input-bandwidth", "input")

KNOBS: dict[str, Knob] = {
    "loader-workers": Knob(
        "number of loader worker processes for each rank",
        _LOADING,
        "DataLoader(num_workers={value}, persistent_workers=True)",
        "knobs.loader:workers",
        Range(1, 64),
        r"\bDataLoader\(",
        "memory for a copy of the dataset's Python objects in each process; different "
        "random augmentations",
    ),
    "persistent-workers": Knob(
        "loader workers continue in the next epoch",
        ("loader-start", *_LOADING),
        "DataLoader(persistent_workers=True)",
        "knobs.loader:persistent",
        ON,
        r"\bDataLoader\(",
        "memory of the workers between epochs",
    ),
    "prefetch": Knob(
        "number of batches that each loader worker prefetches",
        _LOADING,
        "DataLoader(prefetch_factor={value})",
        "knobs.loader:prefetch",
        Range(1, 64),
        r"\bDataLoader\(",
        "memory for these batches",
    ),
    "pin-memory": Knob(
        "batches are in pinned memory, from which a GPU copies asynchronously",
        _LOADING,
        "DataLoader(pin_memory=True), and .to(device, non_blocking=True)",
        "knobs.loader:pinned",
        ON,
        r"\bDataLoader\(",
        "node memory that cannot be swapped",
    ),
    "bucket-mb": Knob(
        "size of DDP's gradient buckets, in MiB",
        ("bucket-size",),
        "DistributedDataParallel(bucket_cap_mb={value}); paceline run --tune-exchange finds the "
        "best value for a script",
        "knobs.ddp:bucket",
        Range(0.1, 4096, whole=False),
        r"\b(DistributedDataParallel|DDP)\(",
    ),
    "exchange": Knob(
        'backend of collectives on CPUs: "paceline" uses shared memory within a node, and one '
        "exchange per node between nodes",
        ("exchange-bandwidth", "exchange-latency", "bucket-size", "no-overlap"),
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
    "nccl-algorithm": Knob(
        "algorithm of NCCL's collectives, instead of the one that NCCL selects",
        ("exchange-bandwidth", "exchange-latency"),
        "NCCL_ALGO={value} in the environment",
        "knobs.nccl:algorithm",
        Choice(("Ring", "Tree")),
        costs="time for messages of other sizes; an error if NCCL does not have this algorithm",
    ),
    "nccl-protocol": Knob(
        "protocol of NCCL's collectives, instead of the one that NCCL selects",
        ("exchange-bandwidth", "exchange-latency"),
        "NCCL_PROTO={value} in the environment",
        "knobs.nccl:protocol",
        Choice(("LL", "LL128", "Simple")),
        costs="time for messages of other sizes; an error if NCCL does not have this protocol",
    ),
    "nccl-channels": Knob(
        "minimum number of NCCL's channels",
        ("exchange-bandwidth",),
        "NCCL_MIN_NCHANNELS={value} in the environment",
        "knobs.nccl:channels",
        Range(1, 64),
        costs="multiprocessors of the GPU, which then do not compute",
    ),
    "gradient-views": Knob(
        "gradients are views of DDP's buckets, without copies",
        ("exchange-bandwidth", "bucket-size"),
        "DistributedDataParallel(gradient_as_bucket_view=True)",
        "knobs.ddp:views",
        ON,
        r"\b(DistributedDataParallel|DDP)\(",
    ),
    "unused-search-off": Knob(
        "DDP does not search for unused parameters",
        ("unused-parameter-search",),
        "DistributedDataParallel(find_unused_parameters=False)",
        "knobs.ddp:no_search",
        ON,
        r"find_unused_parameters",
        "an error as soon as a parameter is unused",
    ),
    "accumulate-locally": Knob(
        "only the last backward of an optimizer step synchronizes gradients",
        ("accumulation-exchange",),
        "with model.no_sync(): around all backwards of an optimizer step except the last",
        "knobs.accumulate:locally",
        ON,
        r"\.backward\(",
    ),
    "compress-bf16": Knob(
        "DDP sends gradients as bfloat16, half of the bytes",
        ("exchange-bandwidth",),
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        "knobs.ddp:as_bf16",
        ON,
        r"\b(DistributedDataParallel|DDP)\(",
        "precision: gradients are rounded to 8 significant bits",
        numbers=True,
        excludes=LESS,
    ),
    "compress-fp16": Knob(
        "DDP sends gradients as float16, half of the bytes",
        ("exchange-bandwidth",),
        "model.register_comm_hook(None, default_hooks.fp16_compress_hook)",
        "knobs.ddp:as_fp16",
        ON,
        r"\b(DistributedDataParallel|DDP)\(",
        "precision: gradients are rounded to 11 significant bits, and those above 65,504 overflow",
        numbers=True,
        excludes=LESS,
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
        "comm.local_sgd:every",
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
        "knobs.process:threads",
        Range(1, 1024),
        r"set_num_threads\(|OMP_NUM_THREADS",
    ),
    "own-binding-off": Knob(
        "Paceline ignores the core binding that the script sets; the launcher's binding applies",
        ("binding",),
        "remove os.sched_setaffinity, and use paceline run --bind core",
        "knobs.process:unbound",
        ON,
        r"sched_setaffinity|cpu_affinity",
    ),
    "keep-memory": Knob(
        "glibc keeps freed memory for later allocations (mallopt)",
        ("allocator",),
        "MALLOC_TOP_PAD_, MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, or jemalloc",
        "knobs.process:kept",
        ON,
        costs="memory of a rank stays at its peak",
        excludes=("jemalloc",),
    ),
    "jemalloc": Knob(
        "jemalloc replaces the memory allocator, and keeps freed memory",
        ("allocator",),
        "LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1",
        "knobs.process:jemalloc",
        ON,
        costs="memory of a rank stays at its peak; each rank starts a separate interpreter",
        excludes=("keep-memory",),
    ),
    "huge-pages": Knob(
        "large tensors use huge pages: 512 times fewer page faults",
        ("allocator",),
        "THP_MEM_ALLOC_ENABLE=1 in the environment",
        "knobs.process:huge_pages",
        ON,
        costs="memory of pages that tensors fill only in part",
    ),
    "channels-last": Knob(
        "convolutions get weights and images in the channels-last memory format",
        ("layout",),
        "model.to(memory_format=torch.channels_last), and the same for the images",
        "knobs.channels_last:channels_last",
        ON,
    ),
    "autocast-bf16": Knob(
        "forward and backward compute in bfloat16 where that is safe (autocast)",
        (COMPUTING,),
        "with torch.autocast(device, torch.bfloat16): around the forward",
        "knobs.compute:autocast",
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
        "knobs.compute:products",
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
        "knobs.compute:compiled",
        ON,
        costs="up to minutes in the first step, and again for inputs of other shapes",
    ),
    "float32": Knob(
        "float32 instead of float64",
        ("precision",),
        "use float32 where its precision is sufficient",
        looks_for=r"float64|\.double\(|torch\.double",
        numbers=True,
    ),
    "one-exchange": Knob(
        "one collective instead of many small ones",
        ("exchange-latency",),
        "one collective over a stacked tensor, or one collective every N steps (as world.log does)",
        looks_for=r"\b(all_reduce|all_gather|reduce|broadcast)\w*\(",
    ),
    "ddp": Knob(
        "gradients are synchronized during the backward",
        ("no-overlap",),
        "torch.nn.parallel.DistributedDataParallel, or world.distribute(model, optimizer)",
        looks_for=r"\ball_reduce\w*\(",
    ),
    "no-synchronisation": Knob(
        "ranks and devices do not wait in the middle of a step",
        ("synchronisation",),
        "call barrier, .item() and print only every 100th step, or leave the value on the device",
        looks_for=r"barrier\(|\.item\(|\bprint\(|\.cpu\(",
    ),
    "script-beside": Knob(
        "the script does its other work less often, or in a thread",
        ("script",),
        "do this work less often, or in a thread that releases the GIL",
    ),
    "collect-rarely": Knob(
        "Python's garbage collector does not run in each step",
        ("garbage-collection",),
        "gc.freeze() after the set-up, and no gc.collect() in each step; or gc.disable(), and "
        "gc.collect() after many steps",
        looks_for=r"\bgc\.collect\(",
        costs="memory of unreachable objects until the next collection",
    ),
    "threads-beside": Knob(
        "another process does the work of the other Python thread",
        ("interpreter",),
        "multiprocessing instead of threading, or a library that releases the GIL",
        looks_for=r"Thread\(",
    ),
    "validate-on-all": Knob(
        "each rank validates a part of the data",
        ("validation-on-one-rank",),
        "for x, y in world.batches(world.shard(loader)), and world.log over all ranks",
        looks_for=r"\.eval\(\)|no_grad|inference_mode",
    ),
    "async-checkpoint": Knob(
        "checkpoints are written during the training",
        ("checkpoint", "checkpoint-on-one-rank"),
        "torch.distributed.checkpoint.async_save, or world.epochs(checkpoint=...)",
        looks_for=r"\bsave\w*\(",
        costs="memory for a copy of the state",
    ),
    "rarer-checkpoint": Knob(
        "checkpoints are written half as often",
        ("checkpoint", "checkpoint-on-one-rank"),
        "save half as often: a failure then costs at most twice as many steps (world.epochs also "
        "saves before a time limit)",
        looks_for=r"\bsave\w*\(",
        costs="more steps to repeat after a failure",
    ),
    "larger-batch": Knob(
        "batches of twice the size, with half as many gradient synchronizations per sample",
        ("exchange-bandwidth", "exchange-latency", "no-overlap"),
        "double batch_size, and multiply the learning rate by 2 (SGD) or 1.4 (Adam), with warm-up",
        looks_for=r"\bDataLoader\(|batch_size",
        costs="more samples until the same loss if batches exceed the gradient noise scale; memory "
        "for activations",
        numbers=True,
    ),
    "pack": Knob(
        "samples are in a few large files, and threads make the batches",
        ("input-small-files",),
        'paceline pack FOLDER PACKED, and paceline.data.Loader("PACKED", ...) for DataLoader',
        looks_for=r"\bDataLoader\(",
        costs="space for a second copy of the samples",
    ),
    "stage": Knob(
        "samples are on node-local storage",
        ("input-bandwidth",),
        "paceline pack, and paceline stage PACKED on each node, which copies to node-local storage "
        "(PACELINE_STAGE); paceline check --data PACKED predicts the gain",
        looks_for=r"\bDataLoader\(|\bLoader\(",
        costs="space on each node",
    ),
    "offline": Knob(
        "preprocessing that is the same in each epoch is done once",
        ("input-preprocessing",),
        "paceline pack --apply MODULE:FUNCTION for transforms without random numbers; paceline "
        "check --data DATASET --transform MODULE:FUNCTION measures their time per sample",
        looks_for=r"\bDataLoader\(|\bLoader\(",
        costs="space for a second copy of the samples",
    ),
    "leave-rank-out": Knob(
        "the device of the slow rank is not used",
        ("slow-rank",),
        "paceline run with one rank fewer; the global batch becomes smaller",
        numbers=True,
    ),
    "equal-batches": Knob(
        "batches of the ranks have the same number of elements",
        ("uneven-data",),
        "a sampler that puts samples of similar length into the same step (bucketing)",
        looks_for=r"Sampler\(|\bDataLoader\(",
        numbers=True,
    ),
    "leave-host-out": Knob(
        "the slow node is not used",
        ("slow-host",),
        "paceline run -H with the other hosts; the global batch becomes smaller",
        numbers=True,
    ),
}
