"""A tiny GPT-2 on counting sequences with the Hugging Face Trainer."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Counting(Dataset):
    """Sequences start, start + stride, start + 2 stride, ... modulo the vocabulary."""

    def __init__(self, size, length=32, vocabulary=128, seed=0):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(vocabulary, (size, 1), generator=g)
        stride = torch.randint(1, 5, (size, 1), generator=g)
        self.tokens = (start + stride * torch.arange(length)) % vocabulary

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()

    set_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=128, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                max_steps=args.steps,
                per_device_train_batch_size=args.batch,
                per_device_eval_batch_size=args.batch,
                gradient_accumulation_steps=args.accumulate,
                learning_rate=1e-3,
                eval_strategy="steps",
                eval_steps=max(1, args.steps // 3),
                save_strategy="steps",
                save_steps=max(1, args.steps // 2),
                logging_steps=10,
                disable_tqdm=True,
                report_to="none",
            ),
            train_dataset=Counting(4096),
            eval_dataset=Counting(64, seed=1),
        )
        result = trainer.train()
        if trainer.is_world_process_zero():
            print(f"final loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
