"""Sentence classification with the Hugging Face Trainer: accumulation, metrics, a cosine schedule."""

import os

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (count,), generator=g)
        self.ids = torch.randint(3, 60, (count, 16), generator=g)
        self.ids[:, 1:5] = self.labels[:, None] * 20 + self.ids[:, 1:5] % 20

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def compute_loss(outputs, labels, num_items_in_batch=None):
    """The mean over all samples of a step: of all accumulated batches, and of all ranks."""
    losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return losses / (num_items_in_batch or len(labels))


def compute_metrics(prediction):
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, -1) == labels).mean()), "count": len(labels)}


if __name__ == "__main__":
    set_seed(3)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    training_args = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=int(os.environ.get("BATCH", "8")),
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        model,
        training_args,
        train_dataset=Sentences(256, 0),
        eval_dataset=Sentences(50, 1),
        compute_loss_func=compute_loss,
        compute_metrics=compute_metrics,
    ).train()
