"""Mistakes of validation and metrics, and of the statistics of batch norm."""

from cases import Planted

# fmt: off
GRADES = '''\
"""Grades of a product from measurements, with Lightning."""

import argparse
import os

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def measurements(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 14, generator=g)
    quality = x[:, 0] - x[:, 1] * x[:, 2] + 0.3 * torch.randn(count, generator=g)
    return TensorDataset(x, torch.bucketize(quality, torch.tensor([-0.8, 0.8])))


class Grader(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(14, 40), torch.nn.LayerNorm(40), torch.nn.GELU(), torch.nn.Linear(40, 3)
        )

    def training_step(self, batch, batch_idx):
        x, grade = batch
        loss = F.cross_entropy(self.layers(x), grade)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, grade = batch
        logits = self.layers(x)
        accuracy = (logits.argmax(-1) == grade).float().mean()
        self.log("val_loss", F.cross_entropy(logits, grade), sync_dist=True)
        self.log("val_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Printer(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        told = {name: round(value.item(), 5) for name, value in trainer.callback_metrics.items()}
        if trainer.is_global_zero:
            print(trainer.current_epoch, told)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    pl.seed_everything(0)
    train = DataLoader(measurements(240, 1), batch_size=args.batch_size, shuffle=True)
    val = DataLoader(measurements(48, 2), batch_size=8)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        max_epochs=args.max_epochs,
        callbacks=[Printer()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Grader(args.lr), train, val)


if __name__ == "__main__":
    main()
'''
# fmt: on


def changed(text: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


CASES = [
    Planted(
        "metric-of-one-rank",
        "log-without-sync",
        source=changed(
            GRADES,
            (
                '        self.log("val_loss", F.cross_entropy(logits, grade), sync_dist=True)\n'
                '        self.log("val_accuracy", accuracy, sync_dist=True)\n',
                '        self.log("val_loss", F.cross_entropy(logits, grade))  # <mistake>\n'
                '        self.log("val_accuracy", accuracy, prog_bar=True)  # <mistake>\n',
            ),
            (
                "            print(trainer.current_epoch, told)\n",
                "            print(trainer.current_epoch, told)  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "validation-repeats-samples",
        "replaced-sampler",
        source=changed(
            GRADES,
            (
                "    val = DataLoader(measurements(48, 2), batch_size=8)\n",
                "    val = DataLoader(measurements(53, 2), batch_size=9)  # <mistake>\n",
            ),
            (
                "    trainer = pl.Trainer(\n",
                "    trainer = pl.Trainer(  # <mistake>\n",
            ),
            (
                "    trainer.fit(Grader(args.lr), train, val)\n",
                "    trainer.fit(Grader(args.lr), train, val)  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "validation-misses-samples",
        "shortest-rank",
        "denoise_plateau",
        (
            (
                "    sums = torch.zeros(2, dtype=torch.float64)\n",
                "    rounds = torch.tensor(len(starts))\n"
                "    dist.all_reduce(rounds, op=dist.ReduceOp.MIN)  # <mistake>\n"
                "    sums = torch.zeros(2, dtype=torch.float64)\n",
            ),
            (
                "        for start in starts:\n",
                "        for start in starts[: int(rounds)]:  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "validation-misses-samples",
        "trainer-drop-last",
        "tagger_trainer",
        (
            (
                "        per_device_eval_batch_size=8,\n",
                "        per_device_eval_batch_size=8,\n"
                "        dataloader_drop_last=True,  # <mistake>\n",
            ),
            (
                "        eval_dataset=Sentences(48, 1, lengths=(12, 12)),\n",
                "        eval_dataset=Sentences(45, 1, lengths=(12, 12)),  # <mistake>\n",
            ),
            ("    trainer.train()\n", "    trainer.train()  # <mistake>\n"),
        ),
    ),
    Planted(
        "batch-norm-of-one-rank",
        "part-converted",
        "motion_fabric",
        (
            (
                "    model = of_all_ranks(MotionNet())\n",
                "    model = MotionNet()\n    of_all_ranks(model.trunk)  # <mistake>\n",
            ),
            (
                "            nn.Linear(48, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), "
                "nn.Linear(32, ACTIVITIES)\n",
                "            nn.Linear(48, 32, bias=False),\n"
                "            nn.BatchNorm1d(32),  # <mistake>\n"
                "            nn.ReLU(),\n            nn.Linear(32, ACTIVITIES),\n",
            ),
            (
                "        return self.head(self.trunk(motion))\n",
                "        return self.head(self.trunk(motion))  # <mistake>\n",
            ),
            (
                "    model, optimizer = fabric.setup(model, optimizer)\n",
                "    model, optimizer = fabric.setup(model, optimizer)  # <mistake>\n",
            ),
            (
                "            fabric.backward(loss)\n",
                "            fabric.backward(loss)  # <mistake>\n",
            ),
        ),
        true=("gradients-differ", "batch-norm-differs"),
    ),
    Planted(
        "batch-norm-differs",
        "weight-average-statistics",
        "motion_fabric",
        (
            (
                "from torch import nn\n",
                "from torch import nn\nfrom torch.optim.swa_utils import AveragedModel, update_bn\n",
            ),
            (
                "    model, optimizer = fabric.setup(model, optimizer)\n",
                "    model, optimizer = fabric.setup(model, optimizer)\n"
                "    average = AveragedModel(MotionNet())  # PyTorch's norms, for inference\n",
            ),
            (
                "            optimizer.zero_grad()\n",
                "            optimizer.zero_grad()\n            average.update_parameters(model)\n",
            ),
            (
                "        model.eval()\n        with torch.no_grad():\n            hits = (model(",
                "        update_bn(loader, average)  # <mistake>\n"
                "        average.eval()\n        with torch.no_grad():\n            hits = (average(",
            ),
            (
                ".motion[mine]).argmax(1) == test_set.activity[mine]).sum()\n",
                ".motion[mine]).argmax(1) == test_set.activity[mine]).sum()  # <mistake>\n",
            ),
        ),
    ),
]
