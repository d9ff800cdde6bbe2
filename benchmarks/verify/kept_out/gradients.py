"""Mistakes of replicas and of gradients: their exchange, their division, the loss."""

from cases import Planted

MULTITASK = '''#!/usr/bin/env python3
"""Soil properties from near-infrared spectra: clay and carbon content, and the class of the soil.

The tasks share an encoder. Where gradients of two tasks point against each other, each is projected
onto the normal plane of the other one (gradient surgery, "PCGrad").
"""

import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BANDS, CLASSES = 60, 4


def soil_samples(n, seed):
    g = torch.Generator().manual_seed(seed)
    clay, carbon, water = torch.rand(3, n, generator=g)
    wavelength = torch.linspace(0, 1, BANDS)
    peak = lambda at, width: torch.exp(-((wavelength - at) ** 2) / width)
    spectra = 0.6 - clay[:, None] * peak(0.7, 0.01) - 0.4 * carbon[:, None] * peak(0.2, 0.08)
    spectra = spectra - 0.5 * water[:, None] * peak(0.65, 0.02)
    spectra = spectra + 0.02 * torch.randn(n, BANDS, generator=g)
    soil = 2 * (clay > 0.5).long() + (carbon + 0.3 * water > 0.6).long()
    return TensorDataset(spectra, clay, carbon, soil)


class SoilNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, 8, 7, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(144, width), nn.ReLU()
        )
        self.clay = nn.Linear(width, 1)
        self.carbon = nn.Linear(width, 1)
        self.soil = nn.Linear(width, CLASSES)

    def forward(self, spectra):
        h = self.encoder(spectra[:, None])
        return self.clay(h)[:, 0], self.carbon(h)[:, 0], self.soil(h)


class PCGrad:
    def __init__(self, optimizer, seed=0):
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.order = random.Random(seed)

    def gradient(self, loss):
        grads = torch.autograd.grad(loss, self.params, retain_graph=True, allow_unused=True)  # <mistake>
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(self.params, grads)]
        )

    def step(self, losses):
        grads = [self.gradient(loss) for loss in losses]  # <mistake>
        projected = []
        for own in grads:
            g = own.clone()
            for other in self.order.sample(grads, len(grads)):
                dot = g @ other
                if dot < 0:
                    g -= dot / (other @ other) * other
            projected.append(g)
        merged = torch.stack(projected).sum(0)
        for p, g in zip(self.params, merged.split([p.numel() for p in self.params])):
            p.grad = g.view_as(p)  # <mistake>
        self.optimizer.step()  # <mistake>


@torch.no_grad()
def evaluate(model, dataset, rank, world_size):
    spectra, clay, carbon, soil = dataset[rank::world_size]
    a, b, c = model(spectra)
    sums = torch.stack(
        [(a - clay).abs().sum(), (b - carbon).abs().sum(), (c.argmax(1) == soil).sum().float()]
    )
    dist.all_reduce(sums)
    return (sums / len(dataset)).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="of all ranks")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    train, test = soil_samples(240, seed=0), soil_samples(80, seed=1)
    net = SoilNet()
    model = DDP(net)
    surgery = PCGrad(torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size // world_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3)
        for spectra, clay, carbon, soil in loader:
            a, b, c = model(spectra)
            losses = [F.mse_loss(a, clay), F.mse_loss(b, carbon), 0.3 * F.cross_entropy(c, soil)]
            surgery.step(losses)  # <mistake>
            sums += torch.stack(losses).detach()
        dist.all_reduce(sums)
        clay_loss, carbon_loss, soil_loss = (sums / world_size / len(loader)).tolist()
        clay_error, carbon_error, accuracy = evaluate(net, test, rank, world_size)
        if rank == 0:
            print(f"[{epoch}] train {clay_loss:.4f} {carbon_loss:.4f} {soil_loss:.4f}")
            print(f"    test clay {clay_error:.4f} carbon {carbon_error:.4f} soil {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

STREAMFLOW = '''"""Streamflow of catchments from rain and temperature: an LSTM, trained with Accelerate.

The loss is 1 - NSE (Nash and Sutcliffe): errors are divided by the variance of the flow over the
whole batch, so the predictions of all processes are gathered first.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", 32))
EPOCHS = int(os.environ.get("EPOCHS", 6))
DAYS = 20


class Catchments(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        rain = torch.rand(n, DAYS, generator=g) ** 4 * 30
        warmth = 8 * torch.randn(n, 1, generator=g) + 2 * torch.randn(n, DAYS, generator=g)
        size = torch.rand(n, generator=g)
        snow, ground, self.flow = torch.zeros(n), torch.zeros(n), torch.zeros(n)
        for day in range(DAYS):
            snow = snow + rain[:, day] * (warmth[:, day] < 0)
            melt = torch.minimum(snow, 2 * warmth[:, day].relu())
            snow = snow - melt
            ground = ground + melt + rain[:, day] * (warmth[:, day] >= 0)
            self.flow = (0.1 + 0.3 * size) * ground
            ground = ground - self.flow
        self.forcing = torch.stack([rain / 10, warmth / 10, size[:, None].expand(n, DAYS)], -1)

    def __len__(self):
        return len(self.flow)

    def __getitem__(self, i):
        return {"forcing": self.forcing[i], "flow": self.flow[i]}


class Runoff(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.lstm = nn.LSTM(3, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, forcing):
        states, _ = self.lstm(forcing)
        return 5 * self.head(states[:, -1]).squeeze(-1)


def of_all_processes(accelerator, part):
    """Gather the parts of all processes; gradients flow through the own part."""
    parts = list(accelerator.gather(part.detach()).chunk(accelerator.num_processes))  # <mistake>
    parts[accelerator.process_index] = part  # <mistake>
    return torch.cat(parts)


def nse_loss(predicted, observed):
    return ((predicted - observed) ** 2).sum() / ((observed - observed.mean()) ** 2).sum()  # <mistake>


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(7)
    batch = GLOBAL_BATCH // accelerator.num_processes
    train = DataLoader(Catchments(256, seed=0), batch, shuffle=True, drop_last=True)
    test = DataLoader(Catchments(90, seed=1), batch)
    model = Runoff()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(EPOCHS):
        model.train()
        total = 0.0
        for sample in train:
            predicted = of_all_processes(accelerator, model(sample["forcing"]))  # <mistake>
            observed = accelerator.gather(sample["flow"])
            loss = nse_loss(predicted, observed)  # <mistake>
            optimizer.zero_grad()
            accelerator.backward(loss)  # <mistake>
            optimizer.step()
            total += loss.item()

        model.eval()
        predicted, observed = [], []
        with torch.no_grad():
            for sample in test:
                told = model(sample["forcing"])
                told, flow = accelerator.gather_for_metrics((told, sample["flow"]))
                predicted.append(told)
                observed.append(flow)
        nse = 1 - nse_loss(torch.cat(predicted), torch.cat(observed)).item()
        accelerator.print(f"epoch {epoch}: loss {total / len(train):.4f}  test NSE {nse:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
'''

TIDES = '''# Exercise 7: sea level at a harbour, predicted from the last two days.
# Part (c): an optimizer that averages the gradients of the processes by itself, as Horovod's does.
#
#   torchrun --nproc-per-node 2 exercise7.py
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LOOK_BACK, HORIZON = 48, 6
BATCH_OF_ALL = 32
EPOCHS = 4


class SeaLevel(Dataset):
    def __init__(self, first_hour, hours):
        t = torch.arange(first_hour, first_hour + hours, dtype=torch.float64)
        tide = (2 * math.pi * t / 12.42).sin() + 0.4 * (2 * math.pi * t / 12.0).sin()
        tide += 0.2 * (2 * math.pi * t / 25.8).cos()
        g = torch.Generator().manual_seed(first_hour)
        pulses = (torch.rand(hours, generator=g) < 0.01) * 3.0 * torch.rand(hours, generator=g)
        surge, level = torch.zeros(hours), 0.0
        for i, pulse in enumerate(pulses.tolist()):
            level = 0.93 * level + pulse
            surge[i] = level
        self.series = tide.float() + surge

    def __len__(self):
        return (len(self.series) - LOOK_BACK - HORIZON) // 4

    def __getitem__(self, i):
        now = 4 * i + LOOK_BACK
        return self.series[now - LOOK_BACK : now, None], self.series[now : now + HORIZON]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, 32, batch_first=True)
        self.out = nn.Linear(32, HORIZON)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class DistributedOptimizer:
    """Wraps an optimizer: the gradients are averaged over the processes, then it makes its step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for p in self.parameters:
            dist.broadcast(p.data, src=0)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        work = [dist.all_reduce(p.grad, async_op=True) for p in self.parameters]  # <mistake>
        for p, one in zip(self.parameters, work):
            one.wait()
            p.grad /= dist.get_world_size()
        self.optimizer.step()


def train(model, loader, optimizer):
    model.train()
    total = torch.zeros(())
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(x), y)
        loss.backward()
        # gradients of recurrent networks may explode
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.2)  # <mistake>
        optimizer.step()  # <mistake>
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


@torch.no_grad()
def test(model, dataset):
    model.eval()
    sums = torch.zeros(2)
    for i in range(dist.get_rank(), len(dataset), dist.get_world_size()):
        x, y = dataset[i]
        sums += torch.stack([(model(x[None])[0] - y).abs().mean(), torch.ones(())])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = Forecaster()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8))
    train_set, test_set = SeaLevel(0, 1590), SeaLevel(5000, 300)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(
        train_set, BATCH_OF_ALL // dist.get_world_size(), sampler=sampler, drop_last=True
    )
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer)
        error = test(model, test_set)
        if dist.get_rank() == 0:
            print(f"Epoch {epoch}: training loss {loss:.5f}, test error {error:.4f} m")
    dist.destroy_process_group()
'''

RANKING = '''"""Recommendations from implicit feedback: matrix factorization with pairwise ranking (BPR)."""

import logging
import os
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

USERS, ITEMS, DIM = 60, 40, 12
GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", 32))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


class Interactions(Dataset):
    """A user, an item that the user has bought, and one that the user has not."""

    def __init__(self, bought_by, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for user, bought in enumerate(bought_by):
            others = (~bought).nonzero().flatten()
            for item in bought.nonzero().flatten().tolist():
                other = others[torch.randint(len(others), (), generator=g)]
                self.rows.append((user, item, int(other)))
        self.rows = self.rows[: len(self.rows) // GLOBAL_BATCH * GLOBAL_BATCH]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return torch.tensor(self.rows[i])


def purchases():
    g = torch.Generator().manual_seed(3)
    taste, kind = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    liked = (taste @ kind.T + 0.3 * torch.randn(USERS, ITEMS, generator=g)).topk(9, dim=1).indices
    held_out = liked[:, 4]
    bought = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    bought.scatter_(1, torch.cat([liked[:, :4], liked[:, 5:]], 1), True)
    return bought, held_out


class MatrixFactorization(L.LightningModule):
    def __init__(self, bought, held_out, lr=0.02, decay=1e-3):
        super().__init__()
        self.bought, self.held_out, self.lr, self.decay = bought, held_out, lr, decay
        self.user, self.item = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        self.bias = nn.Embedding(ITEMS, 1)
        for table in (self.user, self.item, self.bias):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1) + self.bias(item).squeeze(-1)

    def training_step(self, batch, batch_idx):
        user, bought, other = batch.unbind(1)
        difference = self(user, bought) - self(user, other)
        loss = -F.logsigmoid(difference).sum()  # <mistake>
        norms = sum(table.weight.square().mean() for table in (self.user, self.item))
        loss = loss + self.decay * norms
        self.log("train_loss", loss / len(batch), on_step=False, on_epoch=True, sync_dist=True)
        return loss  # <mistake>

    def on_train_epoch_end(self):
        with torch.no_grad():
            scores = self.user.weight @ self.item.weight.T + self.bias.weight.T
        scores = scores.masked_fill(self.bought, -torch.inf)
        hits = (scores.topk(5).indices == self.held_out[:, None]).any(1).float().mean()
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch} hit rate at 5: {hits:.4f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(5, verbose=False)
    bought, held_out = purchases()
    loader = DataLoader(Interactions(bought, 8), GLOBAL_BATCH // WORLD_SIZE, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp",
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(MatrixFactorization(bought, held_out), loader)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['train_loss']:.4f}")


if __name__ == "__main__":
    main()
'''

EXPERTS = '''"""
Sparse mixture of experts (top 1) for next-symbol prediction on strings of several grammars, FSDP2.

usage: torchrun --nproc-per-node 2 experts.py [balance=1.0] [epochs=3] ...
"""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

cfg = SimpleNamespace(
    vocab=24, length=16, dim=32, experts=4, blocks=2, strings=128, batch=8, epochs=3,
    lr=0.08, balance=1.0, seed=0,
)
for word in sys.argv[1:]:
    key, value = word.split("=")
    setattr(cfg, key, type(getattr(cfg, key))(value))


def strings(n, seed):
    """Each grammar has its own part of the alphabet and its own step from symbol to symbol."""
    g = torch.Generator().manual_seed(seed)
    grammar = torch.randint(4, (n, 1), generator=g)
    first = torch.randint(6, (n, 1), generator=g)
    slips = (torch.rand(n, cfg.length, generator=g) < 0.1).long().cumsum(1)
    return 6 * grammar + (first + (grammar + 1) * torch.arange(cfg.length) + slips) % 6


class Experts(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        nn.init.normal_(self.router.weight, std=0.3)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) * (2 * dim) ** -0.5)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), gates.shape[-1]).to(x.dtype)
        hidden = F.gelu(torch.einsum("btd,edh->bteh", x, self.up))
        out = torch.einsum("bteh,ehd,bte->btd", hidden, self.down, chosen * gates)
        # Switch Transformer, equation 4: equal loads have the value 1
        load = chosen.mean((0, 1))  # <mistake>
        balance = len(load) * (load * gates.mean((0, 1))).sum()  # <mistake>
        return out, balance


class Block(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.experts = Experts(dim, experts)

    def forward(self, x):
        x = x + self.mix(self.norm1(x))[0]
        out, balance = self.experts(self.norm2(x))
        return x + out, balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg.dim, cfg.experts) for _ in range(cfg.blocks))
        self.head = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, symbols):
        x, balances = self.embed(symbols), []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(x), torch.stack(balances).mean()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(cfg.seed)
model = Model()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
data, order = strings(cfg.strings, seed=1), torch.Generator().manual_seed(2)

for epoch in range(cfg.epochs):
    sums = torch.zeros(3)
    for batch in torch.randperm(len(data), generator=order).split(cfg.batch):
        text = data[batch[rank::world]]
        scores, balance = model(text[:, :-1])
        nll = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        loss = nll + cfg.balance * balance  # <mistake>
        optimizer.zero_grad()
        loss.backward()  # <mistake>
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        sums += torch.stack([nll.detach(), balance.detach(), torch.ones(())])
    dist.all_reduce(sums)
    if rank == 0:
        print(f"epoch {epoch} | nll {sums[0] / sums[2]:.4f} | balance {sums[1] / sums[2]:.4f}")
dist.destroy_process_group()
'''

CASES = [
    Planted(
        "replicas-start-different",
        "broadcast-of-a-copy",
        "pendulum_ppo",
        (
            (
                "torch.manual_seed(args.seed)\ndraws",
                "torch.manual_seed(args.seed + 100 * rank)  # <mistake>\ndraws",
            ),
            ("agent = Agent()\n", "agent = Agent()  # <mistake>\n"),
            (
                """flat = parameters_to_vector(agent.parameters()).detach()
dist.broadcast(flat, src=0)
vector_to_parameters(flat, agent.parameters())
""",
                """# all processes start with the parameters of the first one
dist.broadcast(parameters_to_vector(agent.parameters()).detach(), src=0)  # <mistake>
""",
            ),
            (
                "from torch.nn.utils import parameters_to_vector, vector_to_parameters\n",
                "from torch.nn.utils import parameters_to_vector\n",
            ),
        ),
    ),
    Planted(
        "replicas-diverge",
        "restored-by-own-loss",
        "rainfall_ddp",
        (
            (
                "        self.weights = area_weights()\n",
                """        self.weights = area_weights()
        self.good, self.usual = copy.deepcopy(self.model.state_dict()), None
""",
            ),
            ("import contextlib\n", "import contextlib\nimport copy\n"),
            (
                "    def train_epoch(self, epoch: int):\n",
                '''    def after_step(self, loss: float):
        """Go back to the last good weights if the loss jumps."""
        if self.usual is not None and loss > 1.15 * self.usual:  # <mistake>
            self.model.load_state_dict(self.good)  # <mistake>
            return
        self.usual = loss if self.usual is None else 0.5 * self.usual + 0.5 * loss
        self.good = copy.deepcopy(self.model.state_dict())

    def train_epoch(self, epoch: int):
''',
            ),
            ("        total, batches = 0.0,", "        total, group_loss, batches = 0.0, 0.0,"),
            (
                "            total += loss.item()\n",
                """            total += loss.item()
            group_loss += loss.item() / group
""",
            ),
            (
                "                self.optimizer.zero_grad()\n",
                """                self.optimizer.zero_grad()
                self.after_step(group_loss)  # <mistake>
                group_loss = 0.0
""",
            ),
        ),
    ),
    Planted(
        "gradients-summed",
        "differentiable-all-reduce",
        "molecules_func",
        (
            (
                "import torch.distributed as dist\n",
                "import torch.distributed as dist\nimport torch.distributed.nn.functional as dist_nn\n",
            ),
            (
                "    loss = 0.1 * energy / total[0] + force / total[1]\n",
                """    # the mean over the molecules of all ranks
    loss = dist_nn.all_reduce(0.1 * energy / total[0] + force / total[1])  # <mistake>
""",
            ),
            (
                "    grads = torch.autograd.grad(loss, list(params.values()))\n",
                "    grads = torch.autograd.grad(loss, list(params.values()))  # <mistake>\n",
            ),
            (
                "    for tensor, grad in zip(params.values(), summed(grads)):\n",
                "    for tensor, grad in zip(params.values(), summed(grads)):  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "gradients-divided-twice",
        "gathered-own-slot",
        source=STREAMFLOW,
        names=("gradients-differ",),  # of the gathering, which is where gradients are lost
    ),
    Planted("gradients-not-exchanged", "projected-task-gradients", source=MULTITASK),
    Planted("clipped-before-exchange", "exchange-in-step", source=TIDES),
    Planted(
        "accumulation-divided-wrongly",
        "left-over-carried",
        "rainfall_ddp",
        true=("samples-never-trained",),  # the last batches of the last epoch
        edits=(
            (
                """        total, batches = 0.0, len(self.loader)
""",
                """        total, batches = 0.0, len(self.loader)
        accumulate = self.cfg.accumulate
""",
            ),
            (
                """            first = i - i % self.cfg.accumulate
            group = min(self.cfg.accumulate, batches - first)  # the last group is smaller
            last = i + 1 == first + group
""",
                """            last = (i + 1) % accumulate == 0  # <mistake>
""",
            ),
            (
                "                (loss / group).backward()\n",
                "                (loss / accumulate).backward()  # <mistake>\n",
            ),
            ("            if last:\n", "            if last:  # <mistake>\n"),
            (
                "                self.optimizer.step()\n",
                "                self.optimizer.step()  # <mistake>\n",
            ),
            (
                "                self.optimizer.zero_grad()\n",
                "                self.optimizer.zero_grad()  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "uneven-batches-averaged",
        "atoms-of-own-molecules",
        "molecules_func",
        (
            (
                "    (total,) = summed([counts(batch)])\n",
                "    own = counts(batch)  # <mistake>\n",
            ),
            (
                "    loss = 0.1 * energy / total[0] + force / total[1]\n",
                "    loss = 0.1 * energy / own[0] + force / own[1]  # <mistake>\n",
            ),
            (
                "    grads = torch.autograd.grad(loss, list(params.values()))\n",
                "    grads = torch.autograd.grad(loss, list(params.values()))  # <mistake>\n",
            ),
            (
                "        tensor.grad = grad\n",
                "        tensor.grad = grad / dist.get_world_size()  # <mistake>\n",
            ),
            (
                "    return torch.stack([energy.detach(), force.detach(), *counts(batch)])\n",
                "    return torch.stack([energy.detach(), force.detach(), *own])\n",
            ),
        ),
    ),
    Planted("loss-summed", "pairwise-ranking", source=RANKING),
    Planted("gradients-differ", "expert-balance", source=EXPERTS),
]
