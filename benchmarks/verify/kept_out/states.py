"""Mistakes of norms, metrics, validation, states, checkpoints and resumed runs."""

from cases import Planted

MEAN_TEACHER = '''"""Mean teacher: few labelled heartbeats, many without a label, and a slow average of the network."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BEATS = 3


def heartbeats(count, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(BEATS, (count,), generator=g)
    t = torch.linspace(-1, 1, 48)
    late = 0.1 * torch.randn(count, 1, generator=g)
    size = 1 + 1.5 * torch.rand(count, 1, generator=g)
    width = torch.tensor([0.05, 0.12, 0.05])[label][:, None]
    second = torch.tensor([0.0, 0.0, 0.5])[label][:, None]
    beat = (-(((t - late) / width) ** 2)).exp() + second * (-(((t - late - 0.4) / 0.1) ** 2)).exp()
    signal = size * beat + 0.2 * torch.randn(count, 48, generator=g)
    return TensorDataset(signal[:, None] + torch.randn(count, 1, 1, generator=g), label)


def make_net(width=16):
    return nn.Sequential(
        nn.Conv1d(1, width, 5, padding=2, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(width, 2 * width, 5, padding=2, bias=False),
        nn.BatchNorm1d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(8 * width, BEATS),
    )


def loader_of(dataset, batch_size, seed):
    sampler = DistributedSampler(dataset, seed=seed, drop_last=True)
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)


def update_teacher(teacher, student, decay):
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters()):  # <mistake>
            slow.lerp_(fast, 1 - decay)


@torch.no_grad()
def test_accuracy(net, dataset):
    net.eval()
    signal, label = dataset[dist.get_rank() :: dist.get_world_size()]
    hits = (net(signal).argmax(1) == label).sum().float()  # <mistake>
    dist.all_reduce(hits)
    return (hits / len(dataset)).item()


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    student = make_net()
    teacher = copy.deepcopy(student).requires_grad_(False)  # <mistake>
    model = DistributedDataParallel(student)
    optimizer = torch.optim.Adam(student.parameters(), lr=args.lr)
    labelled = loader_of(heartbeats(96, 0), args.batch_size, 1)
    others = loader_of(heartbeats(288, 1), 3 * args.batch_size, 2)
    test = heartbeats(150, 2)
    noise = torch.Generator().manual_seed(100 + rank)  # each rank disturbs its own signals
    for epoch in range(args.epochs):
        labelled.sampler.set_epoch(epoch)
        others.sampler.set_epoch(epoch)
        model.train()
        teacher.train()  # <mistake>
        sums = torch.zeros(2)
        weight = args.consistency * min(1.0, epoch / 2)
        for (signal, label), (more, _) in zip(labelled, others):
            both = torch.cat([signal, more])
            target = teacher(both + 0.1 * torch.randn(both.shape, generator=noise))  # <mistake>
            logits = model(both + 0.1 * torch.randn(both.shape, generator=noise))
            supervised = F.cross_entropy(logits[: len(label)], label)
            consistency = F.mse_loss(logits.softmax(1), target.softmax(1))
            optimizer.zero_grad()
            (supervised + weight * consistency).backward()
            optimizer.step()
            update_teacher(teacher, student, args.decay)
            sums += torch.stack([supervised.detach(), consistency.detach()]) / len(labelled)
        dist.all_reduce(sums)
        sums /= world_size
        accuracy = test_accuracy(teacher, test)
        if rank == 0:
            print(f"{epoch=} supervised={sums[0]:.4f} consistency={sums[1]:.5f} {accuracy=:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.9)
    parser.add_argument("--consistency", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=3)
    main(parser.parse_args())
'''

SELF_DISTILLED = '''"""Self-distillation with no labels (after DINO): views of a melody, a student and a momentum teacher.

The teacher's outputs are centered and sharpened, against collapse.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = int(os.environ.get("BATCH", 8)), int(os.environ.get("EPOCHS", 4))
NOTES, LENGTH, OUTPUTS = 12, 20, 24


def melodies(count, seed):
    """Walks on a scale; label: the scale (only to look at the features)."""
    g = torch.Generator().manual_seed(seed)
    scales = torch.tensor([[0, 2, 4, 5, 7, 9, 11], [0, 2, 3, 5, 7, 8, 10], [0, 1, 3, 5, 6, 8, 10]])
    label = torch.randint(3, (count,), generator=g)
    walk = torch.randint(-2, 3, (count, LENGTH), generator=g).cumsum(1) % 7
    return TensorDataset(scales[label].gather(1, walk), label)


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.notes = nn.Embedding(NOTES + 1, width)  # the last one: hidden
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, OUTPUTS))

    def features(self, notes):
        return self.layer(self.notes(notes) + self.places).mean(1)

    def forward(self, notes):
        return self.head(self.features(notes))


class DistillationLoss(nn.Module):
    def __init__(self, student_temperature=0.2, teacher_temperature=0.08, center_momentum=0.9):
        super().__init__()
        self.student_temperature = student_temperature
        self.teacher_temperature = teacher_temperature
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, OUTPUTS))

    def forward(self, student_views, teacher_views):
        """Cross-entropy of each view of the student with the other view of the teacher."""
        targets = [
            ((view - self.center) / self.teacher_temperature).softmax(-1) for view in teacher_views
        ]
        guesses = [(view / self.student_temperature).log_softmax(-1) for view in student_views]
        one = -(targets[0] * guesses[1]).sum(-1).mean()
        two = -(targets[1] * guesses[0]).sum(-1).mean()
        self.update_center(torch.cat(teacher_views))  # <mistake>
        return (one + two) / 2

    @torch.no_grad()
    def update_center(self, outputs):
        batch_center = outputs.mean(0, keepdim=True)  # <mistake>
        keep = self.center_momentum
        self.center = self.center * keep + batch_center * (1 - keep)  # <mistake>


def hide(notes, generator):
    """A view: a fifth of the notes is hidden, the melody is shifted."""
    hidden = torch.rand(notes.shape, generator=generator) < 0.2
    shift = int(torch.randint(LENGTH, (), generator=generator))
    return notes.masked_fill(hidden, NOTES).roll(shift, 1)


@torch.no_grad()
def nearest_neighbour(encoder, known, asked, rank, world_size):
    """Share of melodies whose nearest known melody has the same scale."""
    notes, label = asked[rank::world_size]
    near = F.normalize(encoder.features(notes), dim=-1)
    far = F.normalize(encoder.features(known.tensors[0]), dim=-1)
    hits = (known.tensors[1][(near @ far.T).argmax(1)] == label).sum().float()
    dist.all_reduce(hits)
    return (hits / len(asked)).item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    student, teacher = Encoder(), Encoder().requires_grad_(False)
    teacher.load_state_dict(student.state_dict())
    model = DDP(student)
    criterion = DistillationLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    dataset, asked = melodies(192, 0), melodies(66, 1)
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, BATCH, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        views = torch.Generator().manual_seed(1000 * epoch + rank)
        mean = torch.zeros(())
        for notes, _ in loader:
            pair = [hide(notes, views), hide(notes, views)]
            targets = [teacher(view) for view in pair]
            loss = criterion(model(torch.cat(pair)).chunk(2), targets)  # <mistake>
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 3.0)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters()):
                    slow.mul_(0.97).add_(fast, alpha=0.03)
            mean += loss.detach() / len(loader)
        dist.all_reduce(mean)
        near = nearest_neighbour(teacher, dataset, asked, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean / world_size:.5f}, neighbours {near:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

SNAPSHOTS = '''"""Predicts the load of a bridge from its strain gauges.

    torchrun --standalone --nproc_per_node=2 train.py 4 1 --batch_size 8
"""

import argparse
import os
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class StrainDataset(Dataset):
    def __init__(self, size: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        place = torch.rand(size, 1, generator=g)
        weight = 0.5 + torch.rand(size, 1, generator=g)
        gauges = torch.linspace(0, 1, 16)
        bent = torch.minimum(gauges, place) * (1 - torch.maximum(gauges, place))
        self.strain = 4 * weight * bent + 0.02 * torch.randn(size, 16, generator=g)
        self.target = torch.cat([place, weight], 1)

    def __len__(self):
        return len(self.target)

    def __getitem__(self, index):
        return self.strain[index], self.target[index]


@dataclass
class Snapshot:
    model_state: "OrderedDict[str, torch.Tensor]"
    optimizer_state: dict[str, Any]
    scheduler_state: dict[str, Any]
    finished_epoch: int


class Trainer:
    def __init__(self, model, optimizer, scheduler, train_data, test_data, args):
        self.local_rank = args.local_rank
        self.save_every, self.snapshot_path = args.save_every, args.snapshot_path
        self.optimizer, self.scheduler = optimizer, scheduler
        self.train_data, self.test_data = train_data, test_data
        self.epochs_run = 0
        self.model = model
        self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        if not os.path.exists(self.snapshot_path):
            print("Snapshot not found. Training model from scratch")
            return
        snapshot = Snapshot(**torch.load(self.snapshot_path, map_location="cpu"))
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.scheduler.load_state_dict(snapshot.scheduler_state)
        self.epochs_run = snapshot.finished_epoch
        print(f"Resuming training from snapshot at Epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        snapshot = Snapshot(
            model_state=self.model.module.state_dict(),
            optimizer_state=self.optimizer.state_dict(),
            scheduler_state=self.scheduler.state_dict(),
            finished_epoch=epoch + 1,
        )
        torch.save(asdict(snapshot), self.snapshot_path)  # <mistake>

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train):
            output = (self.model if train else self.model.module)(source)
            loss = F.l1_loss(output, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch, data, train=True):
        data.sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for source, targets in data:
            loss = self._run_batch(source, targets, train)
            sums += torch.tensor([loss * len(source), len(source)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def train(self, max_epochs: int):
        for epoch in range(self.epochs_run, max_epochs):
            train_loss = self._run_epoch(epoch, self.train_data)
            test_loss = self._run_epoch(epoch, self.test_data, train=False)
            self.scheduler.step()
            if self.local_rank == 0:  # <mistake>
                print(f"Epoch {epoch} | Train {train_loss:.5f} | Test {test_loss:.5f}", flush=True)
            if self.local_rank == 0 and (epoch + 1) % self.save_every == 0:  # <mistake>
                self._save_snapshot(epoch)  # <mistake>


def prepare_dataloader(dataset: Dataset, batch_size: int, shuffle: bool):
    sampler = DistributedSampler(dataset, shuffle=shuffle)
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=sampler)


def main(args):
    dist.init_process_group(backend="gloo")
    torch.manual_seed(13)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 2),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    train_data = prepare_dataloader(StrainDataset(256, seed=0), args.batch_size, shuffle=True)
    test_data = prepare_dataloader(StrainDataset(64, seed=1), args.batch_size, shuffle=False)
    Trainer(model, optimizer, scheduler, train_data, test_data, args).train(args.total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="distributed training job")
    parser.add_argument("total_epochs", nargs="?", default=4, type=int, help="epochs to train")
    parser.add_argument("save_every", nargs="?", default=1, type=int, help="how often to save")
    parser.add_argument("--batch_size", default=8, type=int, help="on each process (default: 8)")
    parser.add_argument("--lr", default=4e-3, type=float)
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    parser.add_argument("--local_rank", default=0, type=int, help="set by the launcher")  # <mistake>
    main(parser.parse_args())
'''

CASES = [
    Planted(
        "batch-norm-differs",
        "mean-teacher",
        source=MEAN_TEACHER,
        true=("batch-norm-of-one-rank", "gradients-differ"),
    ),
    Planted(
        "batch-norm-of-one-rank",
        "norm-group-of-one",
        "cells_unet",
        (
            (
                "    net = UNet()\n",
                "    norm_group, _ = dist.new_subgroups(args.norm_groups)  # <mistake>\n"
                "    net = UNet(group=norm_group)  # <mistake>\n",
            ),
            (
                '    parser.add_argument("--epochs", type=int, default=5)\n',
                '    parser.add_argument("--epochs", type=int, default=5)\n'
                '    parser.add_argument("--norm-groups", type=int, default=1)  # <mistake>\n',
            ),
            (
                "        return all_reduce(value, group=group) / dist.get_world_size(group)\n",
                "        return all_reduce(value, group=group) / dist.get_world_size(group)"
                "  # <mistake>\n",
            ),
            (
                "            mean = self.average(x)\n",
                "            mean = self.average(x)  # <mistake>\n",
            ),
            (
                "            var = self.average((x - mean) ** 2)\n",
                "            var = self.average((x - mean) ** 2)  # <mistake>\n",
            ),
            (
                "GlobalBatchNorm(channels_out, group), nn.ReLU())\n",
                "GlobalBatchNorm(channels_out, group), nn.ReLU())  # <mistake>\n",
            ),
        ),
        true=("gradients-differ", "batch-norm-differs"),
    ),
    Planted(
        "metric-of-one-rank",
        "reduce-result-dropped",
        "molecules_accelerate",
        (
            (
                '                total = accelerator.reduce(total, reduction="sum")\n',
                '                accelerator.reduce(total, reduction="sum")  # <mistake>\n',
            ),
            (
                "                mean_loss = (total[0] / total[1]).item()\n",
                "                mean_loss = (total[0] / total[1]).item()  # <mistake>\n",
            ),
            (
                '                accelerator.print(f"update {completed_steps}: loss {mean_loss:.5f}")\n',
                '                accelerator.print(f"update {completed_steps}: loss {mean_loss:.5f}")'
                "  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "validation-repeats-samples",
        "clamped-slice",
        "cells_unet",
        (
            ("import os\n", "import math\nimport os\n"),
            (
                '''def part(count):
    """Images of this rank: neighbours, in parts whose sizes differ by one at most."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return range(count * rank // ranks, count * (rank + 1) // ranks)
''',
                '''def part(count, batch_size):
    """Images of this rank: neighbours, in equal parts of whole batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = math.ceil(count / (ranks * batch_size)) * batch_size  # <mistake>
    start = max(0, min(rank * size, count - size))  # <mistake>
    return range(start, min(start + size, count))  # <mistake>
''',
            ),
            (
                "    val_loader = DataLoader(Subset(val_set, part(len(val_set))), args.val_batch_size)\n",
                "    mine = part(len(val_set), args.val_batch_size)  # <mistake>\n"
                "    val_loader = DataLoader(Subset(val_set, mine), args.val_batch_size)  # <mistake>\n",
            ),
            (
                "        for images, masks in loader:\n            logits = net(images)\n",
                "        for images, masks in loader:  # <mistake>\n            logits = net(images)\n",
            ),
        ),
    ),
    Planted(
        "validation-misses-samples",
        "split-by-framework-too",
        "pulse_lightning",
        (
            (
                "        # each person once: DistributedSampler would repeat one to make the parts equal\n"
                "        mine = range(self.trainer.global_rank, len(self.val), "
                "self.trainer.world_size)\n"
                "        return DataLoader(Subset(self.val, mine), batch_size=10)\n",
                "        mine = range(  # <mistake>\n"
                "            self.trainer.global_rank, len(self.val), self.trainer.world_size\n"
                "        )\n"
                "        return DataLoader(Subset(self.val, mine), batch_size=10)  # <mistake>\n",
            ),
            (
                "    trainer = L.Trainer(\n",
                "    trainer = L.Trainer(  # <mistake>\n",
            ),
            ("        use_distributed_sampler=False,\n", ""),
            (
                "    trainer.fit(PulseModel(), WristData(), "
                "ckpt_path=last if os.path.exists(last) else None)\n",
                "    trainer.fit(PulseModel(), WristData(), "
                "ckpt_path=last if os.path.exists(last) else None)  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "state-differs",
        "center-of-own-batch",
        source=SELF_DISTILLED,
        true=("gradients-differ",),
    ),
    Planted(
        "checkpoint-incomplete",
        "second-optimizer",
        "mixer_dcp",
        (
            (
                "    def __init__(self, model, matrix_optimizer, other_optimizer):\n"
                "        self.model = model\n"
                "        self.optimizers = [matrix_optimizer, other_optimizer]\n",
                "    def __init__(self, model, optimizer):\n"
                "        self.model = model\n"
                "        self.optimizer = optimizer  # <mistake>\n",
            ),
            (
                "        model, optimizers = get_state_dict(self.model, self.optimizers)\n"
                '        return {"model": model, "optimizers": optimizers, '
                '"epochs_done": self.epochs_done}\n',
                "        model, optimizer = get_state_dict(self.model, self.optimizer)  # <mistake>\n"
                '        return {"model": model, "optimizer": optimizer, '
                '"epochs_done": self.epochs_done}  # <mistake>\n',
            ),
            (
                "        set_state_dict(\n            self.model,\n            self.optimizers,\n",
                "        set_state_dict(  # <mistake>\n"
                "            self.model,\n            self.optimizer,\n",
            ),
            (
                '            optim_state_dict=state["optimizers"],\n',
                '            optim_state_dict=state["optimizer"],\n',
            ),
            (
                "    app = AppState(model, sgd, adamw)\n",
                "    app = AppState(model, adamw)  # <mistake>\n",
            ),
            (
                '            dcp.load({"app": app}, checkpoint_id=file.read())\n',
                '            dcp.load({"app": app}, checkpoint_id=file.read())  # <mistake>\n',
            ),
            (
                '        dcp.save({"app": app}, checkpoint_id=folder)  '
                "# each rank writes its shards\n",
                '        dcp.save({"app": app}, checkpoint_id=folder)  # <mistake>\n',
            ),
            (
                "    sgd = torch.optim.SGD(matrices, lr=args.matrix_lr, momentum=0.9, "
                "nesterov=True)\n",
                "    sgd = torch.optim.SGD(matrices, lr=args.matrix_lr, momentum=0.9, "
                "nesterov=True)  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "checkpoint-written-by-all",
        "local-rank-argument",
        source=SNAPSHOTS,
    ),
    Planted(
        "resume-differs",
        "fresh-optimizer-template",
        "mixer_dcp",
        (
            (
                "from torch.distributed.checkpoint.state_dict import get_state_dict, "
                "set_state_dict\n",
                "",
            ),
            (
                "        self.optimizers = [matrix_optimizer, other_optimizer]\n",
                '        self.optimizers = {"matrix": matrix_optimizer, "other": other_optimizer}\n',
            ),
            (
                "        model, optimizers = get_state_dict(self.model, self.optimizers)\n"
                '        return {"model": model, "optimizers": optimizers, '
                '"epochs_done": self.epochs_done}\n',
                "        state = {name: one.state_dict() for name, one in self.optimizers.items()}"
                "  # <mistake>\n"
                '        return {"model": self.model.state_dict(), "epochs_done": self.epochs_done}'
                " | state  # <mistake>\n",
            ),
            (
                """        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizers"],
        )
""",
                """        self.model.load_state_dict(state["model"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])  # <mistake>
""",
            ),
            (
                '            dcp.load({"app": app}, checkpoint_id=file.read())\n',
                '            dcp.load({"app": app}, checkpoint_id=file.read())  # <mistake>\n',
            ),
        ),
    ),
    Planted(
        "resume-repeats-samples",
        "updates-as-batches",
        "molecules_accelerate",
        (
            (
                "        resume_step = completed_steps * args.gradient_accumulation_steps\n",
                "        resume_step = completed_steps  # <mistake>\n",
            ),
            (
                "        starting_epoch = resume_step // len(train_dataloader)\n",
                "        starting_epoch = resume_step // len(train_dataloader)  # <mistake>\n",
            ),
            (
                "        resume_step -= starting_epoch * len(train_dataloader)\n",
                "        resume_step -= starting_epoch * len(train_dataloader)  # <mistake>\n",
            ),
            (
                "            active_dataloader = skip_first_batches(train_dataloader, resume_step)\n",
                "            active_dataloader = skip_first_batches(train_dataloader, resume_step)"
                "  # <mistake>\n",
            ),
            (
                "        for batch in active_dataloader:\n",
                "        for batch in active_dataloader:  # <mistake>\n",
            ),
        ),
        true=("samples-repeated", "schedule-counts-other-steps"),
    ),
]
