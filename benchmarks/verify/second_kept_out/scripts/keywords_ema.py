# Spoken keywords from (synthetic) spectrograms: a small transformer in bfloat16, with an average of
# its weights that is evaluated, and one cycle of the learning rate over the whole training.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--base-lr", type=float, default=1.5e-3, help="for 8 samples")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--checkpoint", default="keywords.ckpt")


def spectrograms(count, seed, frames=16, bands=12, keywords=4):
    g = torch.Generator().manual_seed(seed)
    keyword = torch.randint(keywords, (count,), generator=g)
    band = (2 * keyword[:, None] + torch.arange(frames) // 5) % bands
    sound = nn.functional.one_hot(band, bands) + 0.4 * torch.randn(
        count, frames, bands, generator=g
    )
    return TensorDataset(sound, keyword)


class KeywordNet(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.project = nn.Linear(12, 32)
        self.position = nn.Parameter(0.1 * torch.randn(16, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
        self.out = nn.Linear(32, 4)

    def forward(self, sound):
        return self.out(self.layer(self.project(sound) + self.position).mean(1))


@torch.no_grad()
def evaluate(net, loader, autocast):
    net.eval()
    sums = torch.zeros(3)
    for sound, keyword in loader:
        with autocast():
            logits = net(sound)
        logits = logits.float()
        sums[0] += nn.functional.cross_entropy(logits, keyword, reduction="sum")
        sums[1] += (logits.argmax(1) == keyword).sum()
        sums[2] += len(keyword)
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main(args):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def autocast():
        return torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16")

    train_set, test_set = spectrograms(192, 1), spectrograms(75, 2)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    test = DataLoader(Subset(test_set, range(rank, len(test_set), ranks)), batch_size=32)

    torch.manual_seed(args.seed)
    net = KeywordNet(args.dropout)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model = DDP(net)
    lr = args.base_lr * args.batch_size * ranks / 8
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)
    scheduler = OneCycleLR(optimizer, max_lr=lr, total_steps=args.epochs * len(train))

    begin = 0
    if os.path.isfile(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu")
        net.load_state_dict(state["net"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        begin = state["epochs_done"]

    for epoch in range(begin, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + 1000 * (epoch + 1) + rank)  # dropout of this rank and epoch
        model.train()
        for sound, keyword in train:
            with autocast():
                loss = nn.functional.cross_entropy(model(sound), keyword, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            average.update_parameters(net)
        test_loss, accuracy = evaluate(average, test, autocast)
        if rank == 0:
            state = {
                "net": net.state_dict(),
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epochs_done": epoch + 1,
            }
            torch.save(state, args.checkpoint + ".tmp")
            os.replace(args.checkpoint + ".tmp", args.checkpoint)
            print(f"epoch {epoch}: average's loss {test_loss:.5f}, accuracy {accuracy:.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
