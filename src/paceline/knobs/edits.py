"""Remedies that need an edit of the script, or another start of the job.

These are the remedies of causes for which no setting exists. ``registry.KNOBS`` contains them.
"""

from .knob import ALL, HALF, LADDER, RECORD, Knob, Share

_INPUT = ("input", "input-preprocessing", "input-waiting", "input-small-files", "input-bandwidth")
_DIVIDES_LAYERS = r"\btp\d|\btp=|\.distribute\("
_EVALUATES = r"\.eval\(\)|no_grad|inference_mode"

EDITS: dict[str, Knob] = {
    "read-ahead": Knob(
        "the next batches are made while the training computes",
        _INPUT,
        "read with torch.utils.data.DataLoader(dataset, num_workers=2) or paceline.data.Loader; "
        "with Keras, from a keras.utils.PyDataset with workers=8, or a tf.data.Dataset",
        looks_for=r"^\s*for .*(load|data|batch|read)|PyDataset|\.fit\(",
        costs="memory for the batches of the workers",
        effort=2,
    ),
    "same-work": Knob(
        "all ranks do the same work",
        ("slow-rank",),
        "remove work that only one rank does (code under if rank == ...), or give each rank a "
        "part of it; without such code: paceline check, and end other programs on its cores",
        looks_for=r"^\s*(el)?if .*rank\w*(\(\))?\s*(==|>|<|!=|in\b|%)|^\s*(el)?if .*is_main",
        effort=2,
        saves=Share(ALL, LADDER),
    ),
    "tensor-axis": Knob(
        "the tensor axis has fewer ranks, and the data axis more",
        ("tensor-exchange",),
        "{value}",
        looks_for=_DIVIDES_LAYERS,
        costs="memory for a larger part of the divided layers on each rank; a larger global batch, "
        "or smaller batches of a rank",
    ),
    "rarer-validation": Knob(
        "validation runs half as often",
        ("validation", "validation-on-one-rank"),
        "evaluate half as often, or on half of the validation samples",
        looks_for=_EVALUATES,
        costs="fewer points of the validation curve",
        saves=Share(HALF, LADDER),
    ),
    "collect-rarely": Knob(
        "Python's garbage collector does not run in each step",
        ("garbage-collection",),
        "gc.freeze() after the set-up, and no gc.collect() in each step; or gc.disable(), and "
        "gc.collect() after many steps",
        looks_for=r"\bgc\.collect\(",
        costs="memory of unreachable objects until the next collection",
        saves=Share(ALL, LADDER),
    ),
    "edit-operators": Knob(
        "operators inside the model are avoided, or computed by a faster one",
        (
            *("copies", "small-operators", "recomputation", "activation-checkpointing"),
            *("unused-output", "unneeded-gradient", "slow-operators", "large-intermediate"),
            *("second-backward", "padding", "precision"),
        ),
        "{value}",
        effort=2,
    ),
    "one-exchange": Knob(
        "one collective instead of many small ones",
        ("exchange-latency",),
        "one collective over a stacked tensor, or one collective every N steps (as world.log does)",
        looks_for=r"\b(all_reduce|all_gather|reduce|broadcast)\w*\(",
        effort=2,
    ),
    "no-synchronisation": Knob(
        "ranks and devices do not wait in the middle of a step",
        ("synchronisation",),
        "call barrier, .item() and print only every 100th step, or leave the value on the device",
        looks_for=r"barrier\(|\.item\(|\bprint\(|\.cpu\(",
        saves=Share(ALL, RECORD),
    ),
    "rarer-metrics": Knob(
        "metrics are exchanged together and less often",
        ("metric-collectives",),
        "stack the metrics into one tensor and reduce it every N steps (as world.log does), or "
        "pass async_op=True and wait in the next step",
        looks_for=r"\b(all_reduce|all_gather|reduce|gather|broadcast)\w*\(",
        costs="metrics are known less often",
        saves=Share(ALL, RECORD),
    ),
    "tensors-not-objects": Knob(
        "tensors are exchanged instead of Python objects",
        ("object-collectives",),
        "call dist.all_gather_into_tensor() with tensors of fixed size instead of pickled "
        "objects, or exchange objects every N steps only",
        looks_for=r"_object(_list)?\(",
        effort=2,
        saves=Share(ALL, RECORD),
    ),
    "end-other-programs": Knob(
        "no other program uses the cores of the job",
        ("noisy-machine",),
        "end the other programs (top shows them), or request the nodes exclusively (Slurm: "
        "--exclusive)",
        saves=Share(ALL, RECORD),
    ),
    "even-steps": Knob(
        "ranks have the same work in each step, and a core of their own",
        ("jitter",),
        "run with paceline run --bind core, leave one core of each node free, and give all ranks "
        "batches with the same number of elements",
        effort=2,
        saves=Share(ALL, RECORD, is_limit=True),
    ),
    "spread-ranks": Knob(
        "fewer ranks share a node",
        ("shared-machine",),
        "start the same number of ranks on more nodes (paceline run -H host1:N,host2:N), or fewer "
        "ranks with more threads each (paceline run -n N --threads T)",
        costs="more communication between nodes",
        effort=3,
        saves=Share(ALL, LADDER, is_limit=True),
    ),
    "more-cores": Knob(
        "ranks may use all cores that they need",
        ("binding",),
        "start with paceline run --bind none, or request more cores for each rank (Slurm: "
        "--cpus-per-task=T)",
    ),
    "less-memory": Knob(
        "the ranks of a node fit into its memory",
        ("memory-limit",),
        "reduce batch_size or the number of loader workers, wrap layers in "
        "torch.utils.checkpoint.checkpoint(), or request more memory (Slurm: --mem=SIZE)",
        looks_for=r"\bDataLoader\(|batch_size",
        effort=2,
        saves=Share(ALL, RECORD),
        is_edited_elsewhere=True,
    ),
    "replace-host": Knob(
        "another node takes the place of the slow one",
        ("slow-host",),
        "measure the nodes (paceline check -H host1,host2), and exclude the slow one from the "
        "allocation (Slurm: --exclude=HOST)",
        effort=2,
        saves=Share(ALL, RECORD),
    ),
}
