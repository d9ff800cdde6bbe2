# Causal language model on byte-like tokens, FSDP2.
#   torchrun --nproc-per-node 2 bytes_fsdp.py
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    vocab: int = 32
    context: int = 24
    width: int = 32
    heads: int = 4
    depth: int = 2
    global_batch: int = 16  # chunks of an update, over all ranks
    epochs: int = 3
    lr: float = 4e-3
    warmup: int = 6
    grad_clip: float = 0.3
    seed: int = 1337


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width, bias=False)
        self.proj = nn.Linear(cfg.width, cfg.width, bias=False)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(w, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, w))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(cfg.width), nn.RMSNorm(cfg.width)
        self.attn = Attention(cfg)
        self.gate = nn.Linear(cfg.width, 2 * cfg.width, bias=False)
        self.value = nn.Linear(cfg.width, 2 * cfg.width, bias=False)
        self.down = nn.Linear(2 * cfg.width, cfg.width, bias=False)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.value(h))


class LM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.width)
        self.pos = nn.Embedding(cfg.context, cfg.width)
        self.blocks = nn.ModuleList([Block(cfg) for _ in range(cfg.depth)])
        self.norm = nn.RMSNorm(cfg.width)
        self.lm_head = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def make_chunks(cfg, n, seed):
    """Text of a second-order rule with some noise, cut into chunks of context + 1 tokens."""
    g = torch.Generator().manual_seed(seed)
    length = n * (cfg.context + 1)
    noise = torch.randint(cfg.vocab, (length,), generator=g).tolist()
    keep = (torch.rand(length, generator=g) < 0.9).tolist()
    text = noise[:2]
    for at in range(2, length):
        follow = (3 * text[-1] + text[-2] + 1) % cfg.vocab
        text.append(follow if keep[at] else noise[at])
    return torch.tensor(text).view(n, cfg.context + 1)


class Feed:
    """Every chunk once an epoch: each rank takes its block of every global batch."""

    def __init__(self, chunks, cfg, rank, world):
        self.chunks, self.rank, self.seed = chunks, rank, cfg.seed
        self.batch = cfg.global_batch // world
        self.stride = self.batch * world
        self.steps = len(chunks) // self.stride
        assert self.steps * self.stride == len(chunks), "chunks have to fill all batches"

    def epoch(self, number):
        g = torch.Generator().manual_seed(self.seed + number)
        order = torch.randperm(len(self.chunks), generator=g)
        at = self.rank * self.batch
        for _ in range(self.steps):
            rows = self.chunks[order[at : at + self.batch]]
            yield rows[:, :-1], rows[:, 1:]
            at = (at + self.stride) % len(order)


def loss_sum(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def save(path, epoch, model, optim, sched, rank):
    # the full tensors are gathered by all ranks and kept on rank 0
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optim, options=options)
    if rank == 0:
        state = dict(epoch=epoch, model=weights, optim=moments, sched=sched.state_dict())
        torch.save(state, path)


cfg = Config()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(cfg.seed)
mesh = init_device_mesh("cpu", (world,))
model = LM(cfg)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.1)
train, valid = make_chunks(cfg, 256, seed=0), make_chunks(cfg, 48, seed=5)
feed = Feed(train, cfg, rank, world)
total = cfg.epochs * feed.steps


def lr_at(step):
    if step < cfg.warmup:
        return (step + 1) / cfg.warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - cfg.warmup) / (total - cfg.warmup)))


sched = torch.optim.lr_scheduler.LambdaLR(optim, lr_at)
for epoch in range(cfg.epochs):
    model.train()
    seen = torch.zeros(2)
    for x, y in feed.epoch(epoch):
        tokens = torch.tensor(float(y.numel()))
        dist.all_reduce(tokens)
        nll = loss_sum(model, x, y)
        # FSDP averages over the ranks: times their number, over the tokens of all of them
        loss = nll * world / tokens
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optim.step()
        sched.step()
        optim.zero_grad(set_to_none=True)
        seen += torch.stack([nll.detach(), torch.tensor(float(y.numel()))])
    model.eval()
    held = torch.zeros(2)
    with torch.no_grad():
        for rows in valid.view(-1, 12, cfg.context + 1):
            rows = rows[rank::world]
            held[0] += loss_sum(model, rows[:, :-1], rows[:, 1:])
            held[1] += rows[:, 1:].numel()
    dist.all_reduce(seen)
    dist.all_reduce(held)
    save("lm.pt", epoch, model, optim, sched, rank)
    if rank == 0:
        print(f"epoch {epoch} | train {seen[0] / seen[1]:.4f} | val {held[0] / held[1]:.4f}")
dist.destroy_process_group()
