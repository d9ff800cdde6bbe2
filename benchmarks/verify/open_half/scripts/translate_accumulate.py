# Sequence to sequence on padded sentences. The loss is the mean over all tokens of a step,
# of all micro-batches and all ranks.
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

VOCAB, PAD = 40, 0
BATCH = int(os.environ.get("BATCH", "4"))
ACCUM = int(os.environ.get("ACCUM", "4"))
EPOCHS = int(os.environ.get("EPOCHS", "3"))


class Translator(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.proj = nn.Linear(dim, VOCAB)

    def forward(self, src, tgt_in):
        lengths = (src != PAD).sum(1)  # the state after the last token, not after the padding
        packed = pack_padded_sequence(self.emb(src), lengths, True, enforce_sorted=False)
        _, state = self.encoder(packed)
        out, _ = self.decoder(self.emb(tgt_in), state)
        return self.proj(out)


class Sentences(torch.utils.data.Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(5)
        lengths = torch.randint(3, 14, (n,), generator=g)
        self.rows = [torch.randint(1, VOCAB, (int(k),), generator=g) for k in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.rows[i].flip(0)


def collate(pairs):
    src, tgt = zip(*pairs)
    return pad_sequence(src, True, PAD), pad_sequence(tgt, True, PAD)


def groups(loader, size):
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1234)
model = nn.parallel.DistributedDataParallel(Translator())
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
warmup = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 8, (8 / (s + 1)) ** 0.5))
data = Sentences()
sampler = DistributedSampler(data, seed=7)
loader = DataLoader(data, BATCH, sampler=sampler, collate_fn=collate)
criterion = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum")

step = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for group in groups(loader, ACCUM):
        tokens = torch.tensor(float(sum((tgt != PAD).sum() - len(tgt) for _, tgt in group)))
        dist.all_reduce(tokens)
        loss_sum = torch.zeros(())
        for i, (src, tgt) in enumerate(group):
            last = i == len(group) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(src, tgt[:, :-1])
                loss = criterion(logits.flatten(0, 1), tgt[:, 1:].flatten())
                (loss * world / tokens).backward()
            loss_sum += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        warmup.step()
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"step {step} loss {loss_sum.item() / tokens.item():.5f} norm {norm:.4f}")
        step += 1
dist.destroy_process_group()
