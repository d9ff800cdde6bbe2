"""Mistakes of samples, of random numbers, and of validation."""

from cases import Planted

CASES = [
    Planted(
        "same-samples",
        "no-sampler",
        "cnn_ddp",
        (
            ("    sampler = DistributedSampler(train_set, shuffle=True)\n", ""),
            (
                "    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)\n",
                "    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)  # <mistake>\n",
            ),
            ("        sampler.set_epoch(epoch)\n", ""),
            (
                "        for images, labels in train_loader:\n",
                "        for images, labels in train_loader:  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "samples-repeated",
        "overlap",
        "own_each",
        (
            (
                "        return iter(order[rank::size].tolist())\n",
                """        chunk = self.n // size + 1  # <mistake>
        start = rank * (chunk - batch_size)  # <mistake>
        return iter(order[start : start + chunk].tolist())  # <mistake>
""",
            ),
            (
                "        return len(range(rank, self.n, size))\n",
                "        return self.n // size + 1\n",
            ),
            (
                "loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=rows)\n",
                "loader = torch.utils.data.DataLoader(dataset, batch_size, sampler=rows)  # <mistake>\n",
            ),
            (
                "    for inputs, targets in loader:\n",
                "    for inputs, targets in loader:  # <mistake>\n",
            ),
        ),
        true=("samples-never-trained",),
    ),
    Planted(
        "samples-never-trained",
        "split-twice",
        "cnn_ddp",
        (
            ("import DataLoader, TensorDataset\n", "import DataLoader, Subset, TensorDataset\n"),
            (
                "    sampler = DistributedSampler(train_set, shuffle=True)\n",
                """    train_set = Subset(train_set, range(rank, len(train_set), world_size))  # <mistake>
    sampler = DistributedSampler(train_set, shuffle=False)  # <mistake>
""",
            ),
            (
                "        for images, labels in train_loader:\n",
                "        for images, labels in train_loader:  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "epoch-not-set",
        "constant",
        "mlp_fsdp",
        (
            (
                "        sampler.set_epoch(epoch)\n",
                "        sampler.set_epoch(args.epochs)  # <mistake>\n",
            ),
            (
                "    sampler = DistributedSampler(train, seed=args.seed)\n",
                "    sampler = DistributedSampler(train, seed=args.seed)  # <mistake>\n",
            ),
            ("        for x, y in loader:\n", "        for x, y in loader:  # <mistake>\n"),
        ),
    ),
    Planted(
        "same-random-numbers",
        "noise",
        "gan",
        (
            ("torch.manual_seed(0)\n", "torch.manual_seed(0)  # <mistake>\n"),
            ("torch.manual_seed(100 + rank)\n", ""),
            (
                "        noise = torch.randn(len(real), LATENT)\n",
                "        noise = torch.randn(len(real), LATENT)  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "different-random-numbers",
        "permutation",
        "own_each",
        (
            (
                "        g = torch.Generator().manual_seed(100 + self.epoch)\n"
                "        order = torch.randperm(self.n, generator=g)\n"
                "        return",
                "        g = torch.Generator().manual_seed(1000 * rank + self.epoch)  # <mistake>\n"
                "        order = torch.randperm(self.n, generator=g)  # <mistake>\n"
                "        return",
            ),
            (
                "    for inputs, targets in loader:\n",
                "    for inputs, targets in loader:  # <mistake>\n",
            ),
        ),
        names=("samples-repeated",),
    ),
    Planted(
        "different-random-numbers",
        "random-split",
        "vae_dropout",
        (
            (
                "import DataLoader, DistributedSampler, Subset, TensorDataset\n",
                "import (\n    DataLoader,\n    DistributedSampler,\n    Subset,\n    TensorDataset,\n"
                "    random_split,\n)\n",
            ),
            (
                "    train_set, val_set = TensorDataset(digits[:256]), TensorDataset(digits[256:])\n",
                """    torch.manual_seed(config.seed + 1 + rank)  # <mistake>
    train_set, val_set = random_split(TensorDataset(digits), [256, 47])  # <mistake>
""",
            ),
            (
                "    val_loader = DataLoader(val_part, config.batch_size)\n"
                "    torch.manual_seed(config.seed + 1 + rank)\n",
                "    val_loader = DataLoader(val_part, config.batch_size)\n",
            ),
        ),
        names=("samples-repeated",),
        true=("validation-repeats-samples", "validation-misses-samples"),
    ),
    Planted(
        "validation-repeats-samples",
        "padded-sampler",
        "vae_dropout",
        (
            (
                """    val_part = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_part, config.batch_size)
""",
                """    val_sampler = DistributedSampler(val_set, shuffle=False)  # <mistake>
    val_loader = DataLoader(val_set, config.batch_size, sampler=val_sampler)
""",
            ),
            (
                "            for (x,) in val_loader:\n",
                "            for (x,) in val_loader:  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "validation-misses-samples",
        "floor-split",
        "vae_dropout",
        (
            (
                "    val_part = Subset(val_set, range(rank, len(val_set), world_size))\n",
                """    part = len(val_set) // world_size  # <mistake>
    val_part = Subset(val_set, range(rank * part, (rank + 1) * part))  # <mistake>
""",
            ),
            (
                "            for (x,) in val_loader:\n",
                "            for (x,) in val_loader:  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "metric-of-one-rank",
        "epoch-mean",
        "mlp_fsdp",
        (
            ("        dist.all_reduce(running)\n", ""),
            ("            print(\n", "            print(  # <mistake>\n"),
            (
                """                f"[{epoch}] train {(running[0] / running[1]).item():.5f} "\n""",
                """                f"[{epoch}] train {(running[0] / running[1]).item():.5f} "  # <mistake>\n""",
            ),
        ),
    ),
    Planted(
        "metric-of-one-rank",
        "last-loss",
        "cnn_ddp",
        (
            ("        dist.all_reduce(total)\n", ""),
            ("        total = torch.zeros(2)\n", ""),
            (
                "            total += torch.tensor([loss.item() * len(labels), len(labels)])\n",
                "",
            ),
            (
                """print(f"epoch {epoch}: loss {total[0] / total[1]:.5f}, accuracy {accuracy:.3f}")\n""",
                """print(f"epoch {epoch}: loss {loss.item():.5f}, accuracy {accuracy:.3f}")  # <mistake>\n""",
            ),
        ),
    ),
]
