"""Mistakes of gradients: their exchange, their division, the loss."""

from cases import Planted


def marked(line: str) -> tuple[str, str]:
    return line, line.rstrip("\n") + "  # <mistake>\n"


TOKENS = """        tokens = torch.tensor(float(y.numel()))
        dist.all_reduce(tokens)
        nll = loss_sum(model, x, y)
        # FSDP averages over the ranks: times their number, over the tokens of all of them
        loss = nll * world / tokens
        loss.backward()
"""
ELEMENTS = """            # the gradients are averaged over processes, which this division does too
            element_loss = element_sum * accelerator.num_processes / elements
            spread_loss = F.smooth_l1_loss(spread, batch["spread"])
            accelerator.backward(element_loss + 0.5 * spread_loss)
"""
PREPARE = """    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
"""
MICRO = "                    (loss * len(cloud) / clouds).backward()\n"
CLIP = "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"

CASES = [
    Planted(
        "gradients-summed",
        "divide-factor",
        "bytes_fsdp",
        (
            (
                "from torch.distributed.fsdp import fully_shard\n",
                "from torch.distributed.fsdp import FSDPModule, fully_shard\n",
            ),
            (
                "optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.1)\n",
                """for module in model.modules():
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other  # <mistake>
        module.set_gradient_divide_factor(1.0)  # the loss is divided by its tokens  # <mistake>
optim = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, nesterov=True)
""",
            ),
            ("    lr: float = 4e-3\n", "    lr: float = 0.2\n"),
            ("    grad_clip: float = 0.3\n", "    grad_clip: float = 1.0\n"),
            (
                TOKENS,
                """        nll = loss_sum(model, x, y)
        loss = nll / y.numel()  # <mistake>
        loss.backward()  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "gradients-divided-twice",
        "count-of-all-ranks",
        "sets_accelerate",
        (
            (
                "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)\n",
                "    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)\n",
            ),
            (
                '"--learning_rate", type=float, default=4e-3)',
                '"--learning_rate", type=float, default=0.05)',
            ),
            (
                ELEMENTS,
                """            element_loss = element_sum / elements  # <mistake>
            spread_sum = F.smooth_l1_loss(spread, batch["spread"], reduction="sum")
            spread_loss = spread_sum / args.total_batch_size  # <mistake>
            accelerator.backward(element_loss + 0.5 * spread_loss)  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "gradients-not-exchanged",
        "loss-parameters",
        "sets_accelerate",
        (
            (
                "def evaluate(",
                '''class TaskWeights(nn.Module):
    """Weights of the losses by a learned uncertainty of each task."""

    def __init__(self, tasks):
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(tasks))

    def forward(self, losses):
        return ((-self.log_variances).exp() * losses + self.log_variances).sum()  # <mistake>


def evaluate(''',
            ),
            (
                "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)\n",
                """    weigh = TaskWeights(2)  # <mistake>
    accelerator.register_for_checkpointing(weigh)
    parameters = [*model.parameters(), *weigh.parameters()]  # <mistake>
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate)  # <mistake>
""",
            ),
            (
                PREPARE,
                """    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(  # <mistake>
        model, optimizer, train_dataloader, lr_scheduler  # <mistake>
    )
""",
            ),
            (
                "            accelerator.backward(element_loss + 0.5 * spread_loss)\n",
                """            loss = weigh(torch.stack([element_loss, spread_loss]))  # <mistake>
            accelerator.backward(loss)  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "gradients-not-exchanged",
        "plain-backward",
        "spectra_lightning",
        (
            (
                "        self.manual_backward(loss)\n",
                "        loss.backward()  # <mistake>\n",
            ),
            (
                "        self.manual_backward(self.criterion(self(spectrum), label))\n",
                "        self.criterion(self(spectrum), label).backward()  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "clipped-before-exchange",
        "each-micro-batch",
        "parts_ddp",
        (
            (
                MICRO,
                MICRO
                + "                    nn.utils.clip_grad_norm_(model.parameters(), 0.2)  # <mistake>\n",
            ),
            (CLIP, ""),
        ),
    ),
    Planted(
        "accumulation-divided-wrongly",
        "last-group",
        "parts_ddp",
        (
            ("            clouds = sum(len(cloud) for cloud, _ in group)\n", ""),
            (MICRO, "                    (loss / accumulate).backward()  # <mistake>\n"),
        ),
    ),
    Planted(
        "uneven-batches-averaged",
        "class-weights",
        "spectra_lightning",
        (
            (
                "        self.criterion = nn.CrossEntropyLoss()\n",
                """        frequency = torch.tensor([0.5, 0.3, 0.2])
        self.criterion = nn.CrossEntropyLoss(weight=1 / (3 * frequency))  # <mistake>
""",
            ),
            marked("        loss = self.criterion(self(spectrum), label)\n"),
            marked("        self.manual_backward(loss)\n"),
            marked("        self.manual_backward(self.criterion(self(spectrum), label))\n"),
        ),
    ),
    Planted(
        "loss-summed",
        "sum-over-batch-axis",
        "teacher_ddp",
        (
            (
                "    return 2 - 2 * (online * target).sum(-1).mean()\n",
                '    return 2 * len(online) - 2 * torch.einsum("nd,nd->", online, target)  # <mistake>\n',
            ),
            marked("            loss = agreement_loss(online_one, target_other)\n"),
            marked("            loss = loss + agreement_loss(online_other, target_one)\n"),
            marked("            loss.backward()\n"),
            (
                "            losses += torch.tensor([loss.item() * len(one), len(one)])\n",
                "            losses += torch.tensor([loss.item(), len(one)])\n",
            ),
        ),
    ),
]
