"""A small transformer encoder sharded by fully_shard, saved with distributed checkpoint."""

import argparse
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self, width=256, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())
    loss = None
    for _ in range(args.steps):
        x = torch.randn(args.batch, 16, 256)
        loss = F.mse_loss(model(x), x.mean(1)[:, :8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # one folder for all ranks, named by rank 0
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
    if dist.get_rank() == 0:
        print(f"final loss {loss.item():.4f}, saved {len(os.listdir(folder[0]))} files")
        shutil.rmtree(folder[0])
    # PyTorch 2.13's gloo threads can abort a process that ends right after a collective
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
