"""Mistakes of replicas and of states that have to be equal."""

from cases import Planted

CASES = [
    Planted(
        "replicas-start-different",
        "seed-by-rank",
        "own_each",
        (
            ("torch.manual_seed(42)\n", "torch.manual_seed(42 + rank)  # <mistake>\n"),
            (
                "nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))\n",
                "nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))  # <mistake>\n",
            ),
            ("for param in model.parameters():\n    dist.broadcast(param.data, src=0)\n", ""),
        ),
        names=("different-random-numbers",),
    ),
    Planted(
        "replicas-diverge",
        "skipped-step",
        "cnn_ddp",
        (
            (
                "            optimizer.step()\n",
                "            if loss.item() < 2.35:  # leave out outliers  # <mistake>\n"
                "                optimizer.step()\n",
            ),
        ),
    ),
    Planted(
        "state-differs",
        "ema-on-rank-0",
        "own_each",
        (
            (
                """        with torch.no_grad():
            for averaged, param in zip(ema.parameters(), model.parameters()):
                averaged.lerp_(param, 0.05)
""",
                """        if rank == 0:  # <mistake>
            with torch.no_grad():
                for averaged, param in zip(ema.parameters(), model.parameters()):
                    averaged.lerp_(param, 0.05)  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "batch-norm-differs",
        "own-exchange",
        "own_each",
        (
            (
                "nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), ",
                "nn.Sequential(nn.Linear(20, 48), nn.BatchNorm1d(48), nn.Tanh(),  # <mistake>\n"
                "                      nn.Linear(48, 48), nn.Tanh(), ",
            ),
            ("ema = copy.deepcopy(model)\n", "ema = copy.deepcopy(model).eval()\n"),
            (
                "                averaged.lerp_(param, 0.05)\n",
                "                averaged.lerp_(param, 0.05)\n"
                "            for kept, buffer in zip(ema.buffers(), model.buffers()):\n"
                "                kept.copy_(buffer)\n",
            ),
        ),
    ),
    Planted(
        "batch-norm-of-one-rank",
        "small-batches",
        "cnn_ddp",
        (
            (
                "            nn.GroupNorm(4, channels),\n",
                "            nn.BatchNorm2d(channels),  # <mistake>\n",
            ),
            (
                "            nn.GroupNorm(4, 2 * channels),\n",
                "            nn.BatchNorm2d(2 * channels),  # <mistake>\n",
            ),
            ("    model = DDP(net)\n", "    model = DDP(net)  # <mistake>\n"),
        ),
        arguments=("--batch-size", "2"),
    ),
]
