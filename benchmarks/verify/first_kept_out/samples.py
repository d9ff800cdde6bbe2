"""Mistakes of samples, of random numbers, and of validation."""

from cases import Planted

TRAIN = "        for images, labels in train_loader:\n"
VALIDATE = "    for images, labels in loader:\n"


def marked(line: str) -> tuple[str, str]:
    return line, line.rstrip("\n") + "  # <mistake>\n"


CASES = [
    Planted(
        "same-samples",
        "default-sampler",
        "resnet_ddp",
        (
            (
                "    sampler = DistributedSampler(train_set, seed=args.seed)\n",
                "    sampler = DistributedSampler(train_set, num_replicas=1, rank=0)  # <mistake>\n",
            ),
            marked("        sampler=sampler,\n"),
            marked(TRAIN),
        ),
    ),
    Planted(
        "same-samples",
        "whole-stream",
        "stream_iterable",
        (
            (
                "        for number in numbers[rank::world_size]:\n",
                "        for number in numbers:  # <mistake>\n",
            ),
            marked("        for values, target in loader:\n"),
            (
                '    loader = DataLoader(stream, batch_size=int(os.environ.get("BATCH", 8)))\n',
                '    loader = DataLoader(stream, batch_size=int(os.environ.get("BATCH", 8)))  # <mistake>\n',
            ),
        ),
    ),
    Planted(
        "samples-repeated",
        "workers",
        "stream_workers",
        (
            (
                "        part, parts = self.rank * workers + worker, self.world_size * workers\n",
                "        part, parts = self.rank, self.world_size  # <mistake>\n",
            ),
            marked("        for number in order[part::parts]:\n"),
            marked(
                '    loader = DataLoader(stream, batch_size=int(os.getenv("BATCH", "8")), num_workers=2)\n'
            ),
            marked("        for signals, labels in loader:\n"),
        ),
        true=("same-random-numbers",),
    ),
    Planted(
        "samples-never-trained",
        "remainder",
        "own_flat",
        (
            ("import DataLoader, TensorDataset\n", "import DataLoader, Subset, TensorDataset\n"),
            (
                "    x = torch.rand(192, 6, generator=g)\n",
                "    x = torch.rand(203, 6, generator=g)\n",
            ),
            (
                """    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
""",
                """    part = len(dataset) // world_size  # <mistake>
    mine = Subset(dataset, range(rank * part, (rank + 1) * part))  # <mistake>
    loader = DataLoader(mine, batch_size=args.batch, shuffle=True)  # <mistake>
""",
            ),
            ("        sampler.set_epoch(epoch)\n", ""),
            marked("        for inputs, target in loader:\n"),
        ),
        ranks=4,
    ),
    Planted(
        "epoch-not-set",
        "missing",
        "resnet_ddp",
        (
            ("        sampler.set_epoch(epoch)\n", ""),
            marked("    sampler = DistributedSampler(train_set, seed=args.seed)\n"),
            marked("    for epoch in range(args.epochs):\n"),
            marked("        sampler=sampler,\n"),
        ),
    ),
    Planted(
        "epoch-not-set",
        "same-generator",
        "stream_iterable",
        (
            (
                '        random.Random(f"order of epoch {self.epoch}").shuffle(numbers)\n',
                "        random.Random(1234).shuffle(numbers)  # <mistake>\n",
            ),
            ("        stream.epoch = epoch\n", ""),
            marked("        for values, target in loader:\n"),
            marked("        for number in numbers[rank::world_size]:\n"),
            (
                '    loader = DataLoader(stream, batch_size=int(os.environ.get("BATCH", 8)))\n',
                '    loader = DataLoader(stream, batch_size=int(os.environ.get("BATCH", 8)))  # <mistake>\n',
            ),
        ),
    ),
    Planted(
        "same-random-numbers",
        "dropout",
        "stream_workers",
        (
            marked("    torch.manual_seed(0)\n"),
            ("    torch.manual_seed(1000 + rank)  # other dropout on each rank\n", ""),
            marked("        self.dropout = nn.Dropout(0.1)\n"),
            marked("        return self.fc(self.dropout(x.mean(-1)))\n"),
            marked("            loss = criterion(model(signals), labels)\n"),
        ),
    ),
    Planted(
        "same-random-numbers",
        "worker-seed",
        "resnet_ddp",
        (
            (
                "@torch.no_grad()\ndef validate",
                """def seed_worker(worker):
    torch.manual_seed(1234 + worker)  # reproducible  # <mistake>


@torch.no_grad()
def validate""",
            ),
            (
                "        num_workers=args.workers,\n",
                "        num_workers=args.workers,\n        worker_init_fn=seed_worker,  # <mistake>\n",
            ),
            marked("            if torch.rand(()) < 0.5:\n"),
            marked("            image = image.roll(int(torch.randint(-2, 3, ())), -1)\n"),
            marked(TRAIN),
        ),
        arguments=("--workers", "2"),
    ),
    Planted(
        "different-random-numbers",
        "fixed-features",
        "own_flat",
        (
            (
                "    g = torch.Generator().manual_seed(args.seed)\n"
                "    basis = torch.randn(6, 24, generator=g)  # random Fourier features\n",
                "    torch.manual_seed(args.seed + rank)  # <mistake>\n"
                "    g = torch.Generator().manual_seed(args.seed)\n"
                "    basis = torch.randn(6, 24)  # random Fourier features  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "validation-repeats-samples",
        "gathered",
        "text_accelerate",
        (
            (
                '            predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))\n',
                '            predictions, labels = accelerator.gather((predictions, batch["labels"]))  # <mistake>\n',
            ),
            marked("        for batch in eval_loader:\n"),
            marked(
                "    eval_loader = DataLoader(make_texts(53, 1), args.per_device_batch, collate_fn=collate_fn)\n"
            ),
            (
                "    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(\n",
                "    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "validation-misses-samples",
        "drop-last",
        "resnet_ddp",
        (
            (
                "    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 8)\n",
                """    val_part = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_part, batch_size=8, drop_last=True)  # <mistake>
""",
            ),
            marked(VALIDATE),
        ),
    ),
    Planted(
        "metric-of-one-rank",
        "validation-part",
        "resnet_ddp",
        (
            ("    dist.all_reduce(counts)\n", ""),
            (
                '            print(f"Epoch {epoch + 1}/{args.epochs}  val acc {counts[0] / counts[1]:.4f}")\n',
                '            print(f"Epoch {epoch + 1}/{args.epochs}  val acc {counts[0] / counts[1]:.4f}")  # <mistake>\n',
            ),
        ),
    ),
]
