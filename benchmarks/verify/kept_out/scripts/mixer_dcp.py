"""Textures by an MLP-mixer with FSDP2: weight matrices are trained by SGD with momentum, all other
parameters by AdamW. The shards are saved with torch.distributed.checkpoint after each epoch.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TOKENS, PIXELS, CLASSES = 16, 16, 4


def textures(count, seed):
    """Stripes in four directions, cut into 16 patches of 4 x 4."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (count,), generator=g)
    angle = label * math.pi / CLASSES + 0.15 * torch.randn(count, generator=g)
    phase = 6.28 * torch.rand(count, 1, 1, generator=g)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    image = (1.1 * along + phase).sin() + 0.7 * torch.randn(count, 16, 16, generator=g)
    patches = image.view(count, 4, 4, 4, 4).transpose(2, 3).reshape(count, TOKENS, PIXELS)
    return TensorDataset(patches, label)


class MixerBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_tokens, self.norm_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 32), nn.GELU(), nn.Linear(32, TOKENS))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x):
        x = x + self.tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_channels(x))


class Mixer(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.embed = nn.Linear(PIXELS, width)
        self.blocks = nn.ModuleList(MixerBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, patches):
        x = self.embed(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class AppState(Stateful):
    """All that a run needs to go on."""

    def __init__(self, model, matrix_optimizer, other_optimizer):
        self.model = model
        self.optimizers = [matrix_optimizer, other_optimizer]
        self.epochs_done = 0

    def state_dict(self):
        model, optimizers = get_state_dict(self.model, self.optimizers)
        return {"model": model, "optimizers": optimizers, "epochs_done": self.epochs_done}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizers"],
        )
        self.epochs_done = state["epochs_done"]


def rate_factor(step, total):
    return min(1, (step + 1) / 8) * 0.5 * (1 + math.cos(math.pi * step / total))


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Mixer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is one for one in matrices)]
    sgd = torch.optim.SGD(matrices, lr=args.matrix_lr, momentum=0.9, nesterov=True)
    adamw = torch.optim.AdamW(others, lr=args.lr, weight_decay=0.02)
    app = AppState(model, sgd, adamw)

    train, test = textures(256, 0), textures(75, 1)
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    mine = slice(rank, None, world_size)

    latest = os.path.join(args.folder, "latest")
    if os.path.exists(latest):
        with open(latest) as file:
            dcp.load({"app": app}, checkpoint_id=file.read())
    for epoch in range(app.epochs_done, args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3)
        for step, (patches, label) in enumerate(loader, epoch * len(loader)):
            factor = rate_factor(step, args.epochs * len(loader))
            sgd.param_groups[0]["lr"] = args.matrix_lr * factor
            adamw.param_groups[0]["lr"] = args.lr * factor
            loss = nn.functional.cross_entropy(model(patches), label)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            sgd.step()
            adamw.step()
            model.zero_grad()
            sums[0] += loss.detach() / len(loader) / world_size
        patches, label = test.tensors
        with torch.no_grad():  # one forward call on each rank, of parts that may differ in size
            logits = model(patches[mine])
        sums[1] = nn.functional.cross_entropy(logits, label[mine], reduction="sum") / len(test)
        sums[2] = (logits.argmax(1) == label[mine]).sum() / len(test)
        dist.all_reduce(sums)
        app.epochs_done = epoch + 1
        folder = os.path.join(args.folder, f"epoch-{epoch + 1}")
        dcp.save({"app": app}, checkpoint_id=folder)  # each rank writes its shards
        if rank == 0:
            with open(latest + ".new", "w") as file:
                file.write(folder)
            os.replace(latest + ".new", latest)
            print(f"epoch {epoch + 1}: loss {sums[0]:.5f}, test {sums[1]:.5f}, hits {sums[2]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--matrix-lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--folder", default="mixer")
    main(parser.parse_args())
