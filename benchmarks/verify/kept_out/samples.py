"""Mistakes of samples, of random numbers, of learning rates and of their schedules."""

from cases import Planted


def marked(line: str) -> tuple[str, str]:
    return line, line.rstrip("\n") + "  # <mistake>\n"


# fmt: off
REFERENCE = r'''"""Train a small classifier of textures.

    torchrun --nproc_per_node=2 train.py --epochs 3 --output-dir out
"""

import builtins
import datetime
import os
import time

import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn


# ---------------------------------------------------------------- utils


def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    if not is_dist_avail_and_initialized():
        return 1  # <mistake>
    return dist.get_world_size()


def get_rank():
    if not is_dist_avail_and_initialized():
        return 0  # <mistake>
    return dist.get_rank()


def setup_for_distributed(is_master):
    """This function disables printing when not in master process"""
    builtin_print = builtins.print

    def print(*args, force=False, **kwargs):
        if is_master or force:
            builtin_print(*args, **kwargs)

    builtins.print = print


def init_distributed_mode(args):
    if "RANK" not in os.environ:
        args.distributed = False
        return
    args.distributed = True
    dist.init_process_group(backend=args.dist_backend)
    dist.barrier()
    setup_for_distributed(get_rank() == 0)


class SmoothedValue:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    def synchronize_between_processes(self):
        if not is_dist_avail_and_initialized():
            return
        t = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(t)
        self.total, self.count = t[0].item(), int(t[1].item())

    @property
    def global_avg(self):
        return self.total / self.count


# ---------------------------------------------------------------- data and model


class Textures(torch.utils.data.Dataset):
    def __init__(self, root_seed, n, classes=4, size=16):
        g = torch.Generator().manual_seed(root_seed)
        self.targets = torch.arange(n) % classes
        angle = self.targets * 3.1416 / classes
        y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        along = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
        waves = (along + 6.28 * torch.rand(n, 1, 1, generator=g)).sin()
        self.images = (waves + torch.randn(n, size, size, generator=g))[:, None]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, idx):
        return self.images[idx], self.targets[idx]


def load_data(args):
    print("Loading training data")
    st = time.time()
    dataset = Textures(0, 128)
    dataset_test = Textures(1, 60)
    print("Took", datetime.timedelta(seconds=int(time.time() - st)))
    train_sampler = torch.utils.data.DistributedSampler(  # <mistake>
        dataset, num_replicas=get_world_size(), rank=get_rank(), shuffle=True  # <mistake>
    )
    return dataset, dataset_test, train_sampler


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(dim, dim, 5, padding=2, groups=dim),
            nn.GroupNorm(1, dim),
            nn.Conv2d(dim, 2 * dim, 1),
            nn.GELU(),
            nn.Conv2d(2 * dim, dim, 1),
        )

    def forward(self, x):
        return x + self.block(x)


def convnext_pico(num_classes=4, dim=16):
    return nn.Sequential(
        nn.Conv2d(1, dim, 2, stride=2),
        ConvNeXtBlock(dim),
        ConvNeXtBlock(dim),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(dim, num_classes),
    )


# ---------------------------------------------------------------- engine


def train_one_epoch(model, criterion, optimizer, lr_scheduler, data_loader, epoch, args):
    model.train()
    loss_value = SmoothedValue()
    for image, target in data_loader:  # <mistake>
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        lr_scheduler.step()
        loss_value.update(loss.item(), n=image.shape[0])
    loss_value.synchronize_between_processes()
    print(f"Epoch: [{epoch}] loss {loss_value.global_avg:.4f}")


def evaluate(model, dataset_test, args):
    model.eval()
    correct = SmoothedValue()
    part = range(get_rank(), len(dataset_test), get_world_size())
    loader = torch.utils.data.DataLoader(torch.utils.data.Subset(dataset_test, part), 10)
    with torch.inference_mode():
        for image, target in loader:
            hits = model(image).argmax(1) == target
            correct.update(hits.float().mean().item(), n=len(target))
    correct.synchronize_between_processes()
    print(f"Test: Acc@1 {correct.global_avg:.3f}")


def main(args):
    dataset, dataset_test, train_sampler = load_data(args)  # <mistake>
    init_distributed_mode(args)  # <mistake>
    print(args)
    torch.manual_seed(args.seed)

    data_loader = torch.utils.data.DataLoader(  # <mistake>
        dataset, batch_size=args.batch_size, sampler=train_sampler, drop_last=True
    )
    model = convnext_pico()
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    lr_scheduler = torch.optim.lr_scheduler.PolynomialLR(
        optimizer, total_iters=len(data_loader) * args.epochs, power=0.9
    )
    model_without_ddp = model
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module

    print("Start training")
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, lr_scheduler, data_loader, epoch, args)
        evaluate(model_without_ddp, dataset_test, args)
    if args.output_dir and get_rank() == 0:
        os.makedirs(args.output_dir, exist_ok=True)
        torch.save(model_without_ddp.state_dict(), os.path.join(args.output_dir, "model.pth"))
    if args.distributed:
        dist.destroy_process_group()


def get_args_parser():
    import argparse

    parser = argparse.ArgumentParser(description="PyTorch Classification Training")
    parser.add_argument("-b", "--batch-size", default=8, type=int)
    parser.add_argument("--epochs", default=3, type=int, metavar="N")
    parser.add_argument("--lr", default=0.03, type=float, help="initial learning rate")
    parser.add_argument("--momentum", default=0.9, type=float, metavar="M")
    parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
    parser.add_argument("--label-smoothing", default=0.1, type=float)
    parser.add_argument("--clip-grad-norm", default=1.0, type=float)
    parser.add_argument("--output-dir", default="", type=str)
    parser.add_argument("--dist-backend", default="gloo", type=str)
    parser.add_argument("--seed", default=0, type=int)
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
'''

TRIPS = r'''"""How long a taxi's trip takes, from logs of several depots: files of lines, read by workers.

All readers of files have to yield the same number of trips: DistributedDataParallel waits for a rank
that has no more batches.
"""

import itertools
import math
import os
import random
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

DEPOTS = {"airport": 48, "harbor": 36, "old_town": 18, "station": 42}
WORKERS = 2
BATCH = int(os.environ.get("BATCH", 6))
EPOCHS = int(os.environ.get("EPOCHS", 3))


def write_logs(folder):
    for depot, trips in DEPOTS.items():
        draw = random.Random(depot)
        with open(os.path.join(folder, depot + ".csv"), "w") as file:
            for _ in range(trips):
                hour, km, rain = 24 * draw.random(), draw.expovariate(0.2), draw.random() < 0.3
                crowd = 1 + 0.5 * math.sin(hour / 24 * math.tau) ** 2 + 0.3 * rain
                minutes = 2 + 2.2 * km * crowd + draw.gauss(0, 1)
                file.write(f"{hour:.3f},{km:.3f},{int(rain)},{minutes:.3f}\n")


def parse(line):
    hour, km, rain, minutes = map(float, line.split(","))
    angle = hour / 24 * math.tau
    inputs = [math.sin(angle), math.cos(angle), km / 5, rain, km / 5 * rain]
    return torch.tensor(inputs), torch.tensor([minutes / 10])


class TripLog(IterableDataset):
    def __init__(self, files, rank, world_size):
        self.files, self.rank, self.world_size = files, rank, world_size
        self.epoch = 0

    def __iter__(self):
        worker = get_worker_info()
        reader = self.rank * worker.num_workers + worker.id
        readers = self.world_size * worker.num_workers
        parts = [[] for _ in range(readers)]
        for number, name in enumerate(self.files):
            with open(name) as file:
                parts[number % readers] += file.readlines()
        longest = max(map(len, parts))  # <mistake>
        lines = parts[reader]
        random.Random(f"{self.epoch}/{reader}").shuffle(lines)
        for line in itertools.islice(itertools.cycle(lines), longest):  # <mistake>
            yield parse(line)  # <mistake>


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="trips_") if rank == 0 else None]
    dist.broadcast_object_list(folder)
    if rank == 0:
        write_logs(folder[0])
    dist.barrier()
    files = sorted(os.path.join(folder[0], name) for name in os.listdir(folder[0]))
    log = TripLog(files, rank, world_size)
    loader = DataLoader(log, batch_size=BATCH, num_workers=WORKERS)  # <mistake>

    torch.manual_seed(12)
    net = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
    net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.01)
    for epoch in range(EPOCHS):
        log.epoch = epoch
        sums = torch.zeros(2)
        for inputs, target in loader:  # <mistake>
            loss = nn.functional.smooth_l1_loss(net(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(target), len(target)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

CONFIGURED = r'''"""Which of five gestures an accelerometer recorded: Lightning with a DataModule, and a config."""

import dataclasses
import os
import sys
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", ".*num_workers.*")


@dataclasses.dataclass
class Config:
    gestures: int = 5
    channels: int = 3
    length: int = 24
    width: int = 20
    batch_size: int = 8  # of a device
    max_epochs: int = 4
    learning_rate: float = 0.01  # of one device
    momentum: float = 0.9
    seed: int = 5

    def __post_init__(self):
        devices = int(os.environ.get("WORLD_SIZE", 1))
        self.learning_rate = self.learning_rate * devices  # linear scaling rule  # <mistake>

    @classmethod
    def from_command_line(cls, words):
        """Defaults, and what is given as name=value."""
        config = cls()  # <mistake>
        changes = {"max_epochs": 3}
        for word in words:
            name, value = word.split("=")
            changes[name] = type(getattr(config, name))(value)
        return dataclasses.replace(config, **changes)  # <mistake>


class Gestures(L.LightningDataModule):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def setup(self, stage=None):
        self.train_set = self.record(160, seed=0)
        self.val_set = self.record(40, seed=1)

    def record(self, count, seed):
        c, g = self.config, torch.Generator().manual_seed(seed)
        shapes = torch.randn(
            c.gestures, c.channels, c.length, generator=torch.Generator().manual_seed(77)
        ).cumsum(-1)
        label = torch.arange(count) % c.gestures
        noise = torch.randn(count, c.channels, c.length, generator=g).cumsum(-1)
        return TensorDataset((shapes[label] + 1.2 * noise) / 4, label)

    def train_dataloader(self):
        return DataLoader(self.train_set, self.config.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, self.config.batch_size)


class GestureNet(L.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        c, w = config.channels, config.width
        self.net = nn.Sequential(
            nn.Conv1d(c, w, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(w, w, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(w * config.length // 4, config.gestures),
        )

    def training_step(self, batch, batch_idx):
        motion, label = batch
        return nn.functional.cross_entropy(self.net(motion), label)

    def validation_step(self, batch, batch_idx):
        motion, label = batch
        accuracy = (self.net(motion).argmax(1) == label).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True, batch_size=len(label))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(  # <mistake>
            self.parameters(),
            lr=self.config.learning_rate,  # <mistake>
            momentum=self.config.momentum,
        )
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "epoch"}}


class Report(L.Callback):
    def on_validation_epoch_end(self, trainer, module):
        if trainer.is_global_zero and not trainer.sanity_checking:
            value = trainer.callback_metrics["val_accuracy"].item()
            print(f"epoch {trainer.current_epoch} accuracy {value:.4f}", flush=True)


def main():
    torch.set_num_threads(1)
    config = Config.from_command_line(sys.argv[1:])
    L.seed_everything(config.seed)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy="ddp",
        max_epochs=config.max_epochs,
        num_sanity_val_steps=0,
        callbacks=[Report()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GestureNet(config), datamodule=Gestures(config))


if __name__ == "__main__":
    main()
'''

RANGE_TEST = r'''# Chlorophyll of lakes from reflected light. The learning rate is found by a range test (L. Smith).

import copy
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, random_split, TensorDataset

BANDS = 30


def lakes(n):
    g = torch.Generator().manual_seed(8)
    chlorophyll = torch.rand(n, 1, generator=g)
    sediment = torch.rand(n, 1, generator=g)
    band = torch.linspace(0, 1, BANDS)
    light = sediment * band.sqrt() - chlorophyll * torch.exp(-(((band - 0.6) / 0.1) ** 2))
    light = light + 0.1 * torch.randn(n, BANDS, generator=g)
    return TensorDataset(light, chlorophyll**2 + 0.3 * chlorophyll * sediment)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(BANDS, 48)
        self.body = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.Tanh())
        self.leave = nn.Linear(48, 1)

    def forward(self, light):
        x = torch.tanh(self.enter(light))
        return self.leave(x + self.body(x))


class Learner:
    def __init__(self, data, valid, model, loss_func, bs, momentum=0.9):
        self.sampler = DistributedSampler(data, shuffle=True, seed=1)
        self.dl = DataLoader(data, batch_size=bs, sampler=self.sampler)
        self.valid, self.model, self.loss_func, self.momentum = valid, model, loss_func, momentum

    def lr_find(self, start=1e-3, end=2.0, steps=30, beta=0.6, skip=4):
        """Train a copy with a rising rate; suggest the one where the loss falls fastest."""
        model = copy.deepcopy(self.model)
        opt = optim.SGD(model.parameters(), lr=start, momentum=self.momentum)
        rates, losses, average, batches = [], [], 0.0, iter(self.dl)
        for step in range(steps):
            try:
                x, y = next(batches)  # <mistake>
            except StopIteration:
                batches = iter(self.dl)
                x, y = next(batches)
            for group in opt.param_groups:
                group["lr"] = start * (end / start) ** (step / (steps - 1))
            loss = self.loss_func(model(x), y)
            average = beta * average + (1 - beta) * loss.item()  # <mistake>
            rates.append(group["lr"])
            losses.append(average / (1 - beta ** (step + 1)))
            if losses[-1] > 4 * min(losses):
                break
            opt.zero_grad()
            loss.backward()
            opt.step()
        slopes = [after - before for before, after in zip(losses, losses[1:])]
        return rates[min(range(skip, len(slopes)), key=slopes.__getitem__)]  # <mistake>

    def fit(self, epochs, lr):
        ddp = DistributedDataParallel(self.model)
        opt = optim.SGD(ddp.parameters(), lr=lr, momentum=self.momentum)  # <mistake>
        sched = optim.lr_scheduler.CosineAnnealingLR(opt, epochs * len(self.dl))
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.dl:
                loss = self.loss_func(ddp(x), y)
                loss.backward()
                opt.step()  # <mistake>
                opt.zero_grad()
                sched.step()
            self.report(epoch)

    def report(self, epoch):
        if dist.get_rank() == 0:
            self.model.eval()
            x, y = (torch.stack(column) for column in zip(*self.valid))
            with torch.no_grad():
                print(f"epoch {epoch}  valid loss {self.loss_func(self.model(x), y):.5f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    train, valid = random_split(lakes(232), [192, 40])
    learn = Learner(train, valid, Net(), nn.functional.mse_loss, bs=int(os.getenv("BS", "8")))
    lr = learn.lr_find()  # <mistake>
    learn.fit(4, lr)  # <mistake>
    dist.destroy_process_group()
'''

DIFFUSION = r'''#!/usr/bin/env python
"""Unconditional diffusion of small pictures (crosses and frames), trained with Accelerate."""

import argparse
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_scheduler


class DDPMScheduler:
    """Noise of a picture at a time step, with the cosine table of alphas."""

    def __init__(self, num_train_timesteps=100):
        self.num_train_timesteps = num_train_timesteps
        t = torch.arange(num_train_timesteps) / num_train_timesteps
        self.alphas_cumprod = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    def add_noise(self, clean, noise, timesteps):
        alpha = self.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        return alpha.sqrt() * clean + (1 - alpha).sqrt() * noise


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.inside = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.outside = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x, timesteps):
        phase = timesteps[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
        time = self.time(torch.cat([phase.sin(), phase.cos()], 1))[:, :, None, None]
        high = F.silu(self.inside(x) + time)
        low = F.silu(self.down(high) + time)
        return self.outside(torch.cat([high, self.up(low)], 1))


def make_pictures(n):
    g = torch.Generator().manual_seed(33)
    pictures = -torch.ones(n, 1, 8, 8)
    for picture in pictures:
        kind, size, y, x = torch.randint(0, 4, (4,), generator=g).tolist()
        size = 3 + size % 3
        if kind < 2:
            picture[0, y + size // 2, x : x + size] = 1
            picture[0, y : y + size, x + size // 2] = 1
        else:
            picture[0, y : y + size, x : x + size] = 1
            picture[0, y + 1 : y + size - 1, x + 1 : x + size - 1] = -1
    return pictures


def parse_args():
    parser = argparse.ArgumentParser(description="Simple example of a training script.")
    parser.add_argument("--train_batch_size", type=int, default=8, help="per device")
    parser.add_argument("--num_train_epochs", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--lr_scheduler", type=str, default="cosine")
    parser.add_argument("--lr_warmup_steps", type=int, default=5)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main(args):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    noise_scheduler = DDPMScheduler()
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=1e-3)
    dataset = TensorDataset(make_pictures(192))
    train_dataloader = DataLoader(dataset, shuffle=True, batch_size=args.train_batch_size)
    model, optimizer, train_dataloader = accelerator.prepare(  # <mistake>
        model, optimizer, train_dataloader  # <mistake>
    )
    max_train_steps = args.num_train_epochs * len(train_dataloader)
    lr_scheduler = get_scheduler(  # <mistake>
        args.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes,  # <mistake>
        num_training_steps=max_train_steps * accelerator.num_processes,  # <mistake>
    )
    set_seed(args.seed + 1, device_specific=True)  # noise and time steps of each device

    global_step = 0
    for epoch in range(args.num_train_epochs):
        model.train()
        train_loss = torch.zeros(())
        for (clean_images,) in train_dataloader:
            noise = torch.randn_like(clean_images)
            timesteps = torch.randint(
                0, noise_scheduler.num_train_timesteps, (len(clean_images),)
            )
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            loss = F.mse_loss(model(noisy_images, timesteps), noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            lr_scheduler.step()  # <mistake>
            optimizer.zero_grad()
            global_step += 1
            train_loss += loss.detach() / len(train_dataloader)
        train_loss = accelerator.reduce(train_loss, reduction="mean").item()
        accelerator.print(f"epoch {epoch} step {global_step}/{max_train_steps} {train_loss:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main(parse_args())
'''
# fmt: on

CASES = [
    Planted("same-samples", "built-before-init", source=REFERENCE),
    Planted("samples-repeated", "cycled-to-longest", source=TRIPS),
    Planted(
        "samples-never-trained",
        "small-bucket",
        "speech_buckets",
        (
            (
                "import argparse\n\nimport torch\n",
                "import argparse\nimport bisect\n\nimport torch\n",
            ),
            (
                "    def __init__(self, lengths, batch_size, rank, world_size, seed=0, pool=3):\n",
                "    def __init__(\n        self, lengths, batch_size, rank, world_size, seed=0, "
                "edges=(40, 56, 72)\n    ):\n",
            ),
            (
                "        self.batch_size, self.size = batch_size, batch_size * world_size\n"
                "        self.seed, self.pool, self.epoch = seed, pool, 0\n",
                "        self.size, self.edges = batch_size, edges\n"
                "        self.seed, self.epoch = seed, 0\n",
            ),
            (
                """        batches = []
        for start in range(0, len(order), self.pool * self.size):
            pool = order[start : start + self.pool * self.size]
            pool.sort(key=lambda i: self.lengths[i])
            batches += [pool[at : at + self.size] for at in range(0, len(pool), self.size)]
        mixed = torch.randperm(len(batches), generator=g).tolist()
        return [batches[number][self.rank :: self.world_size] for number in mixed]
""",
                """        buckets = [[] for _ in range(len(self.edges) + 1)]
        for i in order:
            buckets[bisect.bisect(self.edges, self.lengths[i])].append(i)
        mine = []
        for bucket in buckets:
            batches = [bucket[at : at + self.size] for at in range(0, len(bucket), self.size)]
            rounds = len(batches) // self.world_size  # as many for each rank  # <mistake>
            mine += batches[self.rank : rounds * self.world_size : self.world_size]  # <mistake>
        mixed = torch.randperm(len(mine), generator=g).tolist()
        return [mine[number] for number in mixed]  # <mistake>
""",
            ),
            marked(
                "    loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate)\n"
            ),
            marked("        for features, frames, phones, spoken in loader:\n"),
        ),
    ),
    Planted(
        "epoch-not-set",
        "batch-sampler-not-asked",
        "speech_buckets",
        (
            (
                "        sampler.set_epoch(epoch)\n",
                '        if hasattr(loader.sampler, "set_epoch"):  # <mistake>\n'
                "            loader.sampler.set_epoch(epoch)  # <mistake>\n",
            ),
            marked(
                "    sampler = BucketBatchSampler(train_set.lengths, args.batch_size, rank, "
                "world_size, args.seed)\n"
            ),
            marked(
                "    loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate)\n"
            ),
            marked("        g = torch.Generator().manual_seed(self.seed + self.epoch)\n"),
            marked("    for epoch in range(args.epochs):\n"),
            marked("        for features, frames, phones, spoken in loader:\n"),
        ),
    ),
    Planted(
        "same-random-numbers",
        "reseeded-each-epoch",
        "flow_surrogate",
        (
            (
                "        sampler.set_epoch(epoch)\n",
                "        sampler.set_epoch(epoch)\n"
                "        torch.manual_seed(args.seed + epoch)  # as after a restart  # <mistake>\n",
            ),
            marked("            noise = args.noise * torch.randn_like(frame)\n"),
        ),
    ),
    Planted(
        "different-random-numbers",
        "subset-statistics",
        "flow_surrogate",
        (
            (
                '    """Mean and standard deviation of the values of all frames."""\n'
                "    values = np.stack([np.load(file) for file in files])\n",
                '    """Mean and standard deviation of values, estimated from some frames."""\n'
                "    frames = np.concatenate([np.load(file) for file in files])\n"
                "    rng = np.random.default_rng()  # <mistake>\n"
                "    values = frames[rng.choice(len(frames), 12, replace=False)]  # <mistake>\n",
            ),
            (
                "    return float(values.mean()), float(values.std())\n",
                "    return float(values.mean()), float(values.std())  # <mistake>\n",
            ),
            marked("    mean, std = statistics(train_files)\n"),
            marked("        now, later = (pair - self.mean) / self.std\n"),
        ),
    ),
    Planted(
        "learning-rate-not-scaled",
        "scaled-after-schedule",
        "links_graph",
        (
            (
                "    optimizer = torch.optim.SGD(\n"
                "        model.parameters(), lr=args.lr * global_batch / 32, momentum=0.9, "
                "weight_decay=1e-4\n    )\n",
                "    optimizer = torch.optim.SGD(  # <mistake>\n"
                "        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4  # <mistake>\n"
                "    )\n",
            ),
            (
                """    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 1 - step / total_steps),
    )
""",
                """    schedule = torch.optim.lr_scheduler.LambdaLR(  # <mistake>
        optimizer,
        lambda step: min((step + 1) / warmup, 1 - step / total_steps),
    )
    for group in optimizer.param_groups:
        group["lr"] *= global_batch / 32  # linear scaling  # <mistake>
""",
            ),
            marked("            schedule.step()\n"),
        ),
    ),
    Planted("learning-rate-scaled-twice", "post-init-again", source=CONFIGURED),
    Planted(
        "learning-rates-differ",
        "range-test",
        source=RANGE_TEST,
        true=("gradients-not-exchanged",),  # of the copy, during the range test
    ),
    Planted("schedule-counts-other-steps", "multiplied-not-prepared", source=DIFFUSION),
]
