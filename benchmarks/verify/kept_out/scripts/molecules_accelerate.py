#!/usr/bin/env python
# Energies of (invented) molecules from distances between their atoms, with Accelerate.
#
#   accelerate launch --cpu --num_processes 2 molecules_accelerate.py --output_dir runs/a
#
# A run that was stopped is started with the same command: it goes on from its last checkpoint.

import argparse
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

ELEMENTS, LARGEST = 5, 9


class Molecules(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        sizes = torch.randint(4, LARGEST + 1, (count, 1), generator=g)
        self.atoms = torch.randint(1, ELEMENTS, (count, LARGEST), generator=g)  # 0: no atom
        self.atoms[torch.arange(LARGEST) >= sizes] = 0
        self.places = 1.2 * torch.randn(count, LARGEST, 3, generator=g)
        charge = torch.tensor([0, 0.6, -0.8, 0.3, -0.2])[self.atoms]
        distance = torch.cdist(self.places, self.places) + 1
        pairs = charge[:, :, None] * charge[:, None, :] / distance
        self.energy = pairs.sum((1, 2)) / 2 + 0.3 * charge.sum(1)

    def __len__(self):
        return len(self.energy)

    def __getitem__(self, index):
        return {"atoms": self.atoms[index], "places": self.places[index], "y": self.energy[index]}


class MessagePassing(nn.Module):
    def __init__(self, width=24, rounds=2):
        super().__init__()
        self.element = nn.Embedding(ELEMENTS, width, padding_idx=0)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(rounds)
        )
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.register_buffer("centers", torch.linspace(0, 4, 8))

    def forward(self, atoms, places):
        real = (atoms > 0).float()
        bonds = real[:, :, None] * real[:, None, :]
        distance = torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")
        basis = (-2 * (distance[..., None] - self.centers) ** 2).exp()
        h = self.element(atoms)
        for filters, update in zip(self.filters, self.updates):
            message = (filters(basis) * h[:, None] * bonds[..., None]).sum(2) / 4
            h = h + torch.tanh(update(torch.cat([h, message], -1)))
        return (self.energy(h).squeeze(-1) * real).sum(1)


def evaluate(accelerator, model, dataloader):
    model.eval()
    errors = []
    for batch in dataloader:
        with torch.no_grad():
            error = (model(batch["atoms"], batch["places"]) - batch["y"]).abs()
        errors.append(accelerator.gather_for_metrics(error))
    model.train()
    errors = torch.cat(errors)
    return errors.mean().item(), len(errors)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--num_train_epochs", type=int, default=4)
    parser.add_argument("--checkpointing_steps", type=int, default=10)
    parser.add_argument("--logging_steps", type=int, default=5)
    parser.add_argument("--output_dir", default="molecules")
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=8),
    )
    set_seed(8)
    model = MessagePassing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    train_dataloader = DataLoader(
        Molecules(192, 0), args.per_device_train_batch_size, shuffle=True, drop_last=True
    )
    eval_dataloader = DataLoader(Molecules(45, 1), batch_size=8)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    updates_per_epoch = len(train_dataloader) // args.gradient_accumulation_steps
    # not prepared: it is stepped once per update, however many processes there are
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer.optimizer, args.num_train_epochs * updates_per_epoch, eta_min=1e-5
    )
    accelerator.register_for_checkpointing(lr_scheduler)

    starting_epoch = completed_steps = resume_step = 0
    latest = os.path.join(args.output_dir, "latest.txt")
    if os.path.exists(latest):
        with open(latest) as file:
            name = file.read()
        accelerator.load_state(os.path.join(args.output_dir, name))
        completed_steps = int(name.removeprefix("step_"))
        resume_step = completed_steps * args.gradient_accumulation_steps
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)

    total = torch.zeros(2)
    for epoch in range(starting_epoch, args.num_train_epochs):
        active_dataloader = train_dataloader
        if epoch == starting_epoch and resume_step:
            active_dataloader = skip_first_batches(train_dataloader, resume_step)
        active_dataloader.set_epoch(epoch)
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                error = model(batch["atoms"], batch["places"]) - batch["y"]
                loss = error.square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
            total += torch.stack([error.detach().square().sum(), torch.tensor(len(error) * 1.0)])
            if not accelerator.sync_gradients:
                continue
            lr_scheduler.step()
            completed_steps += 1
            if completed_steps % args.logging_steps == 0:
                total = accelerator.reduce(total, reduction="sum")
                mean_loss = (total[0] / total[1]).item()
                accelerator.print(f"update {completed_steps}: loss {mean_loss:.5f}")
                total = torch.zeros(2)
            if completed_steps % args.checkpointing_steps == 0:
                name = f"step_{completed_steps}"
                accelerator.save_state(os.path.join(args.output_dir, name))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    with open(latest, "w") as file:
                        file.write(name)
        error, count = evaluate(accelerator, model, eval_dataloader)
        accelerator.print(f"epoch {epoch}: off by {error:.5f} ({count} molecules)", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
