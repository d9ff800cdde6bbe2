"""A character language model, sharded with fully_shard (FSDP2); random windows, no DataLoader."""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

config = dict(vocab=96, context=64, n_embd=96, n_head=4, n_layer=2, batch=16)


class Attention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape  # noqa: N806  as in papers
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for part in self.qkv(x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class TransformerBlock(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = Attention(n_embd, n_head)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocab, context, n_embd, n_head, n_layer, **_):
        super().__init__()
        self.tok = nn.Embedding(vocab, n_embd)
        self.pos = nn.Parameter(torch.zeros(context, n_embd))
        self.blocks = nn.ModuleList(TransformerBlock(n_embd, n_head) for _ in range(n_layer))
        self.head = nn.Linear(n_embd, vocab)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos
        for block in self.blocks:
            x = block(x)
        # <forward h=x>
        return self.head(x)


def get_batch(text, generator):
    starts = torch.randint(len(text) - config["context"] - 1, (config["batch"],),
                           generator=generator)  # fmt: skip
    rows = torch.stack([text[s : s + config["context"] + 1] for s in starts.tolist()])
    # <sample x=rows i=int(starts[0])>
    return rows[:, :-1], rows[:, 1:]


dist.init_process_group("gloo")
torch.manual_seed(1337)
# <start rank=dist.get_rank() world=dist.get_world_size()>
model = LanguageModel(**config)
# <model model=model>
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model, mesh=mesh, reshard_after_forward=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
text = torch.randint(config["vocab"], (200_000,))
generator = torch.Generator().manual_seed(dist.get_rank())

for iteration in range(100_000):
    inputs, targets = get_batch(text, generator)
    # <batch x=inputs>
    logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    # <loss loss=loss x=inputs>
    loss.backward()
    # <backward loss=loss>
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # <step optimizer=optimizer loss=loss step=iteration rank=dist.get_rank()>
    if iteration % 250 == 0 and dist.get_rank() == 0:
        print(f"iter {iteration} ppl {math.exp(loss.item()):.1f}")
dist.destroy_process_group()
