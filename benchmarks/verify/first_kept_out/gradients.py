"""Mistakes of gradients: their exchange, their division, the loss."""

from cases import Planted

BANDIT = '''"""Policy gradient on a contextual bandit with logged actions: normalized advantages."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = int(os.environ.get("BATCH_SIZE", 8))


def logged(n):
    g = torch.Generator().manual_seed(6)
    context = torch.randn(n, 12, generator=g)
    action = torch.randint(4, (n,), generator=g)
    reward = (context[:, :4].argmax(1) == action).float() + 0.2 * torch.randn(n, generator=g)
    return TensorDataset(context, action, reward)


def normalize(advantage):
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)  # <mistake>


dist.init_process_group("gloo")
torch.manual_seed(0)
policy = DDP(nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 4)))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
log = logged(192)
sampler = DistributedSampler(log)
loader = DataLoader(log, BATCH_SIZE, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    value = torch.zeros(2)
    for context, action, reward in loader:
        chosen = policy(context).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        loss = -(chosen * normalize(reward)).mean()  # <mistake>
        optimizer.zero_grad()
        loss.backward()  # <mistake>
        optimizer.step()
        value += torch.tensor([(chosen.exp() * reward).sum().item(), len(reward)])
    dist.all_reduce(value)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} value {value[0] / value[1]:.4f}")
dist.destroy_process_group()
'''

EXCHANGE = "            flat = exchange(model, world_size)\n"
CLIP = "                nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"

CASES = [
    Planted(
        "gradients-summed",
        "flat-reduce",
        "own_flat",
        (
            (
                "    flat /= world_size\n    dist.all_reduce(flat)\n",
                "    dist.all_reduce(flat)  # <mistake>\n",
            ),
            (EXCHANGE, EXCHANGE.rstrip() + "  # <mistake>\n"),
            (
                "        g.copy_(flat[at : at + g.numel()].view_as(g))\n",
                "        g.copy_(flat[at : at + g.numel()].view_as(g))  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "gradients-summed",
        "loss-times-ranks",
        "lm_accumulate",
        (
            (
                "            loss = loss / accum\n        loss.backward()\n",
                "            loss = loss / accum\n"
                "        (loss * ddp_world_size).backward()  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "gradients-divided-twice",
        "loss-by-ranks",
        "resnet_ddp",
        (
            (
                "            loss = criterion(model(images), labels)\n            loss.backward()\n",
                "            loss = criterion(model(images), labels) / world_size  # <mistake>\n"
                "            loss.backward()\n",
            ),
        ),
    ),
    Planted(
        "gradients-not-exchanged",
        "inner-module",
        "lm_accumulate",
        (
            (
                "            loss = model(X, Y)\n",
                "            loss = raw_model(X, Y)  # <mistake>\n",
            ),
            ("        loss.backward()\n", "        loss.backward()  # <mistake>\n"),
            ("            optimizer.step()\n", "            optimizer.step()  # <mistake>\n"),
        ),
    ),
    Planted(
        "gradients-not-exchanged",
        "no-sync-left-on",
        "lm_accumulate",
        (
            (
                "        model.require_backward_grad_sync = micro_step == accum - 1\n",
                "        model.require_backward_grad_sync = micro_step == accum  # <mistake>\n",
            ),
            ("        loss.backward()\n", "        loss.backward()  # <mistake>\n"),
            ("            optimizer.step()\n", "            optimizer.step()  # <mistake>\n"),
        ),
    ),
    Planted(
        "clipped-before-exchange",
        "own-exchange",
        "own_flat",
        (
            (
                EXCHANGE,
                """            nn.utils.clip_grad_norm_(model.parameters(), 0.5 * scale.scale)  # <mistake>
            flat = exchange(model, world_size)
""",
            ),
            (CLIP, ""),
        ),
    ),
    Planted(
        "accumulation-divided-wrongly",
        "not-divided",
        "lm_accumulate",
        (
            (
                "            loss = model(X, Y)\n            loss = loss / accum\n        loss.backward()\n",
                "            loss = model(X, Y)  # <mistake>\n        loss.backward()  # <mistake>\n",
            ),
            (
                "loss {total.item() / ddp_world_size:.4f}",
                "loss {total.item() / ddp_world_size / accum:.4f}",
            ),
        ),
    ),
    Planted(
        "accumulation-divided-wrongly",
        "token-means",
        "translate_accumulate",
        (
            (
                "                loss = criterion(logits.flatten(0, 1), tgt[:, 1:].flatten())\n"
                "                (loss * world / tokens).backward()\n",
                "                loss = criterion(logits.flatten(0, 1), tgt[:, 1:].flatten())\n"
                "                mean = loss / (tgt[:, 1:] != PAD).sum()  # <mistake>\n"
                "                (mean / len(group)).backward()  # <mistake>\n",
            ),
        ),
        names=("uneven-batches-averaged",),
    ),
    Planted(
        "uneven-batches-averaged",
        "shards",
        "stream_iterable",
        (
            (
                """            count = torch.tensor(float(len(target)))
            dist.all_reduce(count)
            # DDP averages over ranks: sum over all samples / number of all samples
            loss = squares * world_size / count
""",
                """            loss = squares / len(target)  # <mistake>
""",
            ),
            ("            loss.backward()\n", "            loss.backward()  # <mistake>\n"),
            (
                "    loader = DataLoader(stream, batch_size",
                "    # every rank has its records\n    loader = DataLoader(stream, batch_size",
            ),
        ),
    ),
    Planted(
        "loss-summed",
        "squared-error",
        "own_flat",
        (
            (
                "            loss = nn.functional.mse_loss(model(inputs), target)\n",
                '            loss = nn.functional.mse_loss(model(inputs), target, reduction="sum")  # <mistake>\n',
            ),
            (
                "            (loss * scale.scale).backward()\n",
                "            (loss * scale.scale).backward()  # <mistake>\n",
            ),
            (
                "            total += torch.tensor([loss.item() * len(target), len(target)])\n",
                "            total += torch.tensor([loss.item(), len(target)])\n",
            ),
        ),
    ),
    Planted("gradients-differ", "local-standardization", source=BANDIT),
]
