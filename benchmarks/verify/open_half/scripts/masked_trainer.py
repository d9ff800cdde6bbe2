"""Masked-token pretraining of a tiny BERT with the Hugging Face Trainer, evaluated each epoch."""

import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

VOCABULARY, LENGTH, MASK = 96, 20, 1


class MaskedLines(Dataset):
    def __init__(self, lines, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lines = torch.randint(2, VOCABULARY, (lines, LENGTH), generator=generator)
        # The same number of masked tokens in each line: all batches have equal weight.
        self.masked = torch.rand(lines, LENGTH, generator=generator).argsort(1) < 4

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, idx):
        tokens, masked = self.lines[idx], self.masked[idx]
        return {
            "input_ids": tokens.masked_fill(masked, MASK),
            "labels": tokens.masked_fill(~masked, -100),
        }


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=int(os.environ.get("EPOCHS", "3")),
            per_device_train_batch_size=int(os.environ.get("BATCH", "8")),
            per_device_eval_batch_size=16,
            learning_rate=1e-3,
            lr_scheduler_type="linear",
            warmup_steps=4,
            max_grad_norm=1.0,
            # BertForMaskedLM returns the mean of its own batch, whatever num_items_in_batch is.
            average_tokens_across_devices=False,
            eval_strategy="epoch",
            save_strategy="no",
            logging_steps=4,
            disable_tqdm=True,
            report_to="none",
            ddp_find_unused_parameters=False,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=MaskedLines(192, 2),
            eval_dataset=MaskedLines(64, 3),
        )
        trainer.train()


if __name__ == "__main__":
    main()
