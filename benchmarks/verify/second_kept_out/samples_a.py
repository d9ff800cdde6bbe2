"""Mistakes of the samples of training and of random numbers."""

from cases import Planted


def marked(line: str) -> tuple[str, str]:
    return line, line.rstrip("\n") + "  # <mistake>\n"


METERS = '''"""Forecast of a meter's next value from its last day: files of different lengths for each rank."""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FILES = {"north": 61, "south": 40, "east": 52, "west": 33, "center": 70, "harbor": 48}


def read(name, rows):
    """Days of one meter, and the hour after each of them."""
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    hours = torch.arange(25) * math.tau / 24
    height = 1 + torch.rand(rows, 1, generator=g)
    days = height * (hours + 0.3 * torch.randn(rows, 1, generator=g)).sin()
    days += 0.1 * torch.randn(rows, 25, generator=g)
    return days[:, :-1], days[:, -1]


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 40)
        self.last = nn.Linear(40, 1)

    def forward(self, day):
        h = torch.tanh(self.first(day))
        return self.last(h + torch.tanh(self.second(h))).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = args.global_batch // world_size

    mine = list(FILES.items())[rank::world_size]  # <mistake>
    days, targets = (torch.cat(parts) for parts in zip(*(read(*file) for file in mine)))
    batches = list(zip(days.split(batch), targets.split(batch)))  # <mistake>
    steps = torch.tensor(len(days) // batch)  # <mistake>
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)  # or some rank waits for others  # <mistake>
    batches = batches[: int(steps)]  # <mistake>

    torch.manual_seed(1)
    model = DistributedDataParallel(Forecast())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        g = torch.Generator().manual_seed(epoch)
        total = torch.zeros(())
        for number in torch.randperm(len(batches), generator=g).tolist():  # <mistake>
            day, target = batches[number]  # <mistake>
            loss = nn.functional.mse_loss(model(day), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {total.item() / len(batches) / world_size:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

BRACKETS = '''"""Which bracket is next: a stream of texts, read by workers that are kept for all epochs."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WORLD_SIZE = int(os.environ["WORLD_SIZE"])
BATCH_SIZE = int(os.environ.get("GLOBAL_BATCH", 16)) // WORLD_SIZE


def brackets(n, seed=2):
    """Texts of open and closed brackets with depths of at most 3."""
    draw, texts = random.Random(seed), []
    for _ in range(n):
        text, depth = [], 0
        for _ in range(21):
            step = 1 if depth == 0 else -1 if depth == 3 else draw.choice([-1, 1])
            depth += step
            text.append(int(step > 0))
        texts.append(torch.tensor(text))
    return texts


class Texts(IterableDataset):
    def __init__(self, texts):
        self.texts, self.epoch = texts, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        part = dist_rank() * worker.num_workers + worker.id
        order = list(range(len(self.texts)))
        random.Random(1000 + self.epoch).shuffle(order)  # <mistake>
        for number in order[part :: WORLD_SIZE * worker.num_workers]:  # <mistake>
            text = self.texts[number]
            yield text[:-1], text[1:].float()


def dist_rank():
    return int(os.environ["RANK"])


class NextBracket(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 16)
        self.rnn = nn.LSTM(16, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, text):
        return self.out(self.rnn(self.embed(text))[0]).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    model = DDP(NextBracket())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss()
    stream = Texts(brackets(192))
    loader = DataLoader(  # <mistake>
        stream,  # <mistake>
        batch_size=BATCH_SIZE,
        num_workers=1,
        persistent_workers=True,  # <mistake>
    )
    for epoch in range(3):
        stream.set_epoch(epoch)  # <mistake>
        sums = torch.zeros(2)
        for text, following in loader:  # <mistake>
            loss = criterion(model(text), following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(text), len(text)])
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {sums[0] / sums[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

PREPARE = """    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
"""

CASES = [
    Planted(
        "same-samples",
        "framework-sampler-off",
        "spectra_lightning",
        (
            (
                "from torch.utils.data import DataLoader, Dataset\n",
                "from torch.utils.data import DataLoader, Dataset, Sampler\n",
            ),
            (
                "class SpectraModule(",
                '''class Stratified(Sampler):
    """All samples once an epoch, with every class spread over the whole of it."""

    def __init__(self, classes):
        self.classes, self.generator = classes, torch.Generator().manual_seed(4)

    def __len__(self):
        return len(self.classes)

    def __iter__(self):
        place = torch.zeros(len(self.classes))
        for one in self.classes.unique():
            members = (self.classes == one).nonzero().flatten()
            members = members[torch.randperm(len(members), generator=self.generator)]
            jitter = torch.rand(len(members), generator=self.generator)
            place[members] = (torch.arange(len(members)) + jitter) / len(members)
        return iter(place.argsort().tolist())  # <mistake>


class SpectraModule(''',
            ),
            (
                "        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)\n",
                """        sampler = Stratified(self.train_set.classes)  # <mistake>
        return DataLoader(self.train_set, batch_size=self.batch_size, sampler=sampler)  # <mistake>
""",
            ),
            (
                "        max_epochs=4,\n",
                "        max_epochs=4,\n        use_distributed_sampler=False,  # <mistake>\n",
            ),
            marked("    trainer = Trainer(\n"),
            marked("    trainer.fit(SharpnessAware(LEARNING_RATE), datamodule=data)\n"),
        ),
        true=("validation-repeats-samples",),
    ),
    Planted(
        "same-samples",
        "loader-not-prepared",
        "sets_accelerate",
        (
            (
                PREPARE,
                """    model, optimizer, lr_scheduler = accelerator.prepare(model, optimizer, lr_scheduler)  # <mistake>
""",
            ),
            marked("    train_dataloader = DataLoader(\n"),
            marked(
                "        train_sets, batch_size=args.total_batch_size, shuffle=True, collate_fn=collate\n"
            ),
            marked("        for batch in train_dataloader:\n"),
        ),
    ),
    Planted(
        "samples-repeated",
        "local-stride",
        "bytes_fsdp",
        (
            (
                "        self.stride = self.batch * world\n",
                "        self.stride = self.batch  # <mistake>\n",
            ),
            marked("        at = self.rank * self.batch\n"),
            marked("            rows = self.chunks[order[at : at + self.batch]]\n"),
            marked("            at = (at + self.stride) % len(order)\n"),
            marked("    for x, y in feed.epoch(epoch):\n"),
        ),
        names=("same-samples",),
    ),
    Planted("samples-never-trained", "cut-to-shortest", source=METERS),
    Planted(
        "epoch-not-set",
        "cycled-loader",
        "sets_accelerate",
        (
            ("import argparse\n", "import argparse\nimport itertools\n"),
            (
                "    for epoch in range(args.num_epochs):\n",
                """    batches = itertools.cycle(train_dataloader)  # <mistake>
    for epoch in range(args.num_epochs):
""",
            ),
            (
                "        for batch in train_dataloader:\n",
                "        for batch in itertools.islice(batches, len(train_dataloader)):  # <mistake>\n",
            ),
        ),
    ),
    Planted("epoch-not-set", "persistent-workers", source=BRACKETS),
    Planted(
        "same-random-numbers",
        "own-generator",
        "teacher_ddp",
        (
            (
                "        self.curves = curves\n",
                """        self.curves = curves
        self.generator = torch.Generator().manual_seed(31)  # <mistake>
""",
            ),
            (
                "        angle = 6.283 * torch.rand(())\n",
                "        g = self.generator\n"
                "        angle = 6.283 * torch.rand((), generator=g)  # <mistake>\n",
            ),
            (
                "        start = int(torch.randint(0, 17, ()))\n",
                "        start = int(torch.randint(0, 17, (), generator=g))  # <mistake>\n",
            ),
            (
                "        return cut * (0.8 + 0.4 * torch.rand(())) + 0.05 * torch.randn(cut.shape)\n",
                "        size = 0.8 + 0.4 * torch.rand((), generator=g)  # <mistake>\n"
                "        return cut * size + 0.05 * torch.randn(cut.shape, generator=g)  # <mistake>\n",
            ),
            marked("        return self.view(self.curves[i]), self.view(self.curves[i])\n"),
            marked("        for one, other in loader:\n"),
        ),
    ),
    Planted(
        "different-random-numbers",
        "sampler-seed",
        "parts_ddp",
        (
            (
                "    torch.manual_seed(args.seed)\n",
                "    args.seed += rank  # <mistake>\n    torch.manual_seed(args.seed)\n",
            ),
            marked("    sampler = DistributedSampler(train_set, seed=args.seed)\n"),
            marked("        for group in groups_of(train_loader, accumulate):\n"),
            marked("    for batch in loader:\n"),
        ),
        names=("samples-repeated",),
    ),
]
