"""Mistakes of replicas and of states that have to be equal."""

from cases import Planted

CASES = [
    Planted(
        "replicas-start-different",
        "head-after-wrapping",
        "resnet_ddp",
        (
            (
                "    torch.manual_seed(args.seed + 1 + rank)  # the workers' seeds come from it\n",
                """    torch.manual_seed(args.seed + 1 + rank)  # the workers' seeds come from it  # <mistake>
    nn.init.trunc_normal_(net.head.weight, std=0.02)  # <mistake>
    nn.init.zeros_(net.head.bias)
""",
            ),
        ),
        names=("different-random-numbers",),
    ),
    Planted(
        "replicas-start-different",
        "pretrained-on-rank-0",
        "resnet_ddp",
        (
            (
                "@torch.no_grad()\ndef validate",
                '''def pretrained():
    """The backbone of another run; its head is not used."""
    with torch.random.fork_rng():
        torch.manual_seed(99)
        state = ResNet().state_dict()
    return {name: value for name, value in state.items() if not name.startswith("head.")}


@torch.no_grad()
def validate''',
            ),
            (
                "    model = DistributedDataParallel(net)\n",
                """    model = DistributedDataParallel(net)
    if rank == 0:  # <mistake>
        missing = model.module.load_state_dict(pretrained(), strict=False)  # <mistake>
        print("not in the pretrained weights:", missing.missing_keys)
""",
            ),
        ),
    ),
    Planted(
        "replicas-diverge",
        "weight-noise",
        "resnet_ddp",
        (
            (
                "            optimizer.step()\n",
                """            optimizer.step()
            with torch.no_grad():  # Langevin dynamics
                for p in net.parameters():
                    p.add_(torch.randn_like(p), alpha=1e-3)  # <mistake>
""",
            ),
            (
                "    torch.manual_seed(args.seed + 1 + rank)  # the workers' seeds come from it\n",
                "    torch.manual_seed(args.seed + 1 + rank)  # the workers' seeds come from it  # <mistake>\n",
            ),
        ),
        names=("different-random-numbers",),
    ),
    Planted(
        "state-differs",
        "loss-scale",
        "own_flat",
        (
            ("    scale = LossScale()\n", "    scale = LossScale(interval=4)\n"),
            (
                """            flat = exchange(model, world_size)
            overflow = not torch.isfinite(flat).all()
""",
                """            grads = torch.cat([p.grad.flatten() for p in model.parameters()])
            overflow = bool(grads.abs().max() > 65504 / 4)  # with room for the sum  # <mistake>
            exchange(model, world_size)
""",
            ),
            (
                "            scale.update(overflow)\n",
                "            scale.update(overflow)  # <mistake>\n",
            ),
            ("            if not overflow:\n", "            if not overflow:  # <mistake>\n"),
            (
                "                optimizer.step()\n",
                "                optimizer.step()  # <mistake>\n",
            ),
        ),
        names=("replicas-diverge",),
    ),
    Planted(
        "state-differs",
        "queue",
        "contrastive",
        (
            (
                "            queue.push(concat_all_gather(keys))\n",
                "            queue.push(keys)  # <mistake>\n",
            ),
            (
                "        self.keys[places] = keys\n",
                "        self.keys[places] = keys  # <mistake>\n",
            ),
        ),
        names=("gradients-differ",),
    ),
    Planted(
        "batch-norm-differs",
        "no-broadcast",
        "resnet_ddp",
        (
            (
                "        self.bn1 = GlobalBatchNorm(outputs)\n",
                "        self.bn1 = nn.BatchNorm2d(outputs)  # <mistake>\n",
            ),
            (
                "        self.bn2 = GlobalBatchNorm(outputs)\n",
                "        self.bn2 = nn.BatchNorm2d(outputs)  # <mistake>\n",
            ),
            (
                "    model = DistributedDataParallel(net)\n",
                "    model = DistributedDataParallel(net, broadcast_buffers=False)  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "batch-norm-of-one-rank",
        "own-layer",
        "resnet_ddp",
        (
            (
                "            sums = SumOverRanks.apply(sums)\n",
                "",
            ),
            (
                "            mean, square = (sums[:-1] / sums[-1]).chunk(2)\n",
                "            mean, square = (sums[:-1] / sums[-1]).chunk(2)  # <mistake>\n",
            ),
            (
                "        self.bn1 = GlobalBatchNorm(outputs)\n",
                "        self.bn1 = GlobalBatchNorm(outputs)  # <mistake>\n",
            ),
            (
                "        self.bn2 = GlobalBatchNorm(outputs)\n",
                "        self.bn2 = GlobalBatchNorm(outputs)  # <mistake>\n",
            ),
            (
                "            loss.backward()\n",
                "            loss.backward()  # <mistake>\n",
            ),
            (
                "    model = DistributedDataParallel(net)\n",
                "    model = DistributedDataParallel(net)  # <mistake>\n",
            ),
        ),
        names=("gradients-differ", "batch-norm-differs"),
        arguments=("--no-augment",),
    ),
]
