"""Mistakes of gradients: their exchange, their division, the loss."""

from cases import Planted

CLIP_LOSS = '''"""Two encoders and a contrastive loss over the batches of all ranks."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTowers(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, dim))
        self.text = nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, dim))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        image = F.normalize(self.image(image), dim=-1)
        text = F.normalize(self.text(text), dim=-1)
        return image, text, self.logit_scale.exp()


def gather(features):
    everyone = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, features)  # <mistake>
    everyone[dist.get_rank()] = features  # <mistake>
    return torch.cat(everyone)


def clip_loss(image, text, scale):
    all_image, all_text = gather(image), gather(text)  # <mistake>
    labels = torch.arange(len(image)) + len(image) * dist.get_rank()
    per_image = F.cross_entropy(scale * image @ all_text.T, labels)  # <mistake>
    per_text = F.cross_entropy(scale * text @ all_image.T, labels)
    return (per_image + per_text) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(160, 8, generator=generator)
    images = hidden @ torch.randn(8, 32, generator=generator)
    texts = hidden @ torch.randn(8, 20, generator=generator)
    dataset = TensorDataset(images, texts)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, text in loader:
            loss = clip_loss(*model(image, text))
            optimizer.zero_grad()
            loss.backward()  # <mistake>
            optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

CASES = [
    Planted(
        "gradients-summed",
        "communication-hook",
        "cnn_ddp",
        (
            (
                "def evaluate(model, loader):\n",
                """def exchange(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)  # <mistake>
    return work.get_future().then(lambda done: done.value()[0])  # <mistake>


def evaluate(model, loader):
""",
            ),
            (
                "    model = DDP(net)\n",
                "    model = DDP(net)\n    model.register_comm_hook(None, exchange)  # <mistake>\n",
            ),
            (
                "            loss.backward()\n",
                "            loss.backward()  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        # With its default settings, the Trainer of transformers 5.23 multiplies the loss of this
        # model with the number of ranks: it assumes that the model divides by num_items_in_batch.
        "gradients-summed",
        "trainer-default",
        "masked_trainer",
        (
            (
                """            # BertForMaskedLM returns the mean of its own batch, whatever num_items_in_batch is.
            average_tokens_across_devices=False,
""",
                "",
            ),
            ("        trainer.train()\n", "        trainer.train()  # <mistake>\n"),
            (
                "        arguments = TrainingArguments(\n",
                "        arguments = TrainingArguments(  # <mistake>\n",
            ),
            ("        trainer = Trainer(\n", "        trainer = Trainer(  # <mistake>\n"),
        ),
    ),
    Planted(
        "gradients-divided-twice",
        "after-backward",
        "cnn_ddp",
        (
            (
                "            loss.backward()\n",
                """            loss.backward()
            for parameter in model.parameters():
                parameter.grad /= world_size  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "gradients-not-exchanged",
        "partial-list",
        "own_each",
        (
            (
                """        for param in model.parameters():
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
            param.grad /= count
""",
                """        for param in model.parameters():
            if param.dim() > 1:  # the matrices  # <mistake>
                dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
                param.grad /= count
            else:
                param.grad /= len(targets)  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "gradients-not-exchanged",
        "thawed",
        "cnn_ddp",
        (
            ("    net = Net()\n", "    net = Net()\n    net.features.requires_grad_(False)\n"),
            ("    model = DDP(net)\n", "    model = DDP(net)  # <mistake>\n"),
            (
                "        sampler.set_epoch(epoch)\n",
                """        sampler.set_epoch(epoch)
        if epoch == 1:
            net.features.requires_grad_(True)  # <mistake>
""",
            ),
            ("            loss.backward()\n", "            loss.backward()  # <mistake>\n"),
        ),
    ),
    Planted(
        "clipped-before-exchange",
        "tensor-hooks",
        "cnn_ddp",
        (
            (
                "    model = DDP(net)\n",
                """    for parameter in net.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.005, 0.005))  # <mistake>
    model = DDP(net)
""",
            ),
            ("            loss.backward()\n", "            loss.backward()  # <mistake>\n"),
        ),
    ),
    Planted(
        "accumulation-divided-wrongly",
        "by-framework-too",
        "segment_accelerate",
        (
            (
                """                loss = loss_fn(outputs, batch["mask"])
                accelerator.backward(loss)
""",
                """                loss = loss_fn(outputs, batch["mask"])
                loss = loss / accelerator.gradient_accumulation_steps  # <mistake>
                accelerator.backward(loss)  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "uneven-batches-averaged",
        "padded-tokens",
        "translate_accumulate",
        (
            (
                """        dist.all_reduce(tokens)
        loss_sum""",
                """        all_tokens = tokens.clone()
        dist.all_reduce(all_tokens)
        loss_sum""",
            ),
            (
                "                (loss * world / tokens).backward()\n",
                "                (loss / tokens).backward()  # <mistake>\n",
            ),
            (
                "loss {loss_sum.item() / tokens.item():.5f}",
                "loss {loss_sum.item() / all_tokens.item():.5f}",
            ),
            ("        opt.step()\n", "        opt.step()  # <mistake>\n"),
        ),
    ),
    Planted(
        "loss-summed",
        "variational",
        "vae_dropout",
        (
            (
                "            loss = elbo(model(x), x).mean()\n",
                "            loss = elbo(model(x), x).sum()  # <mistake>\n",
            ),
            ("            loss.backward()\n", "            loss.backward()  # <mistake>\n"),
        ),
    ),
    Planted("gradients-differ", "gather-without-gradient", source=CLIP_LOSS),
]
