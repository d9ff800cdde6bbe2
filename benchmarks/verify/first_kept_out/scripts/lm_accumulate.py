"""A tiny GPT: bfloat16 autocast, gradient accumulation, warm-up and cosine, clipping."""

import argparse
import math
import time

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--gradient-accumulation-steps", type=int, default=4)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--learning-rate", type=float, default=2e-3)
parser.add_argument("--grad-clip", type=float, default=1.0)
args = parser.parse_args()
BLOCK, VOCAB = 24, 48


class Windows(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        steps = torch.randint(1, 4, (384 * BLOCK + 1,), generator=g)
        self.tokens = steps.cumsum(0) % VOCAB

    def __len__(self):
        return 384

    def __getitem__(self, i):
        at = i * BLOCK
        return self.tokens[at : at + BLOCK], self.tokens[at + 1 : at + BLOCK + 1]


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, dim=32, heads=4, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(BLOCK, dim)
        self.h = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


init_process_group("gloo")
ddp_rank, ddp_world_size = dist.get_rank(), dist.get_world_size()
master_process = ddp_rank == 0
torch.manual_seed(1337)
raw_model = GPT()
model = DDP(raw_model)
optimizer = torch.optim.AdamW(raw_model.parameters(), args.learning_rate, betas=(0.9, 0.95))
dataset = Windows()
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, args.micro_batch, sampler=sampler, drop_last=True)
accum = args.gradient_accumulation_steps
max_iters = args.epochs * (len(loader) // accum)
warmup_iters = max_iters // 10


def get_lr(it):
    if it < warmup_iters:
        return args.learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return args.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * ratio)))


iter_num, t0 = 0, time.time()
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for batch, (X, Y) in enumerate(loader):
        micro_step = batch % accum
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        model.require_backward_grad_sync = micro_step == accum - 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(X, Y)
            loss = loss / accum
        loss.backward()
        total += loss.detach()
        if micro_step == accum - 1:
            nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            all_reduce(total)
            if master_process:
                print(f"iter {iter_num}: loss {total.item() / ddp_world_size:.4f}")
            total = torch.zeros(())
            iter_num += 1
if master_process:
    print(f"{iter_num} iterations, {time.time() - t0:.0f} s")
destroy_process_group()
