"""Tags words with the Trainer: the loss is the mean over the words of all ranks' sentences."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

WORDS, TAGS, IGNORED = 80, 5, -100


class Sentences(Dataset):
    """Words whose tag depends on the word and on the one before it."""

    def __init__(self, count, seed, lengths=(4, 16)):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(count):
            length = int(torch.randint(lengths[0], lengths[1] + 1, (), generator=g))
            words = torch.randint(1, WORDS, (length,), generator=g)
            before = torch.cat([torch.zeros(1, dtype=torch.long), words[:-1]])
            self.rows.append((words, (words // 20 + (before % 2)) % TAGS))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        words, tags = self.rows[i]
        return {"words": words, "labels": tags}


def collate(rows):
    return {
        "words": pad_sequence([row["words"] for row in rows], True),
        "labels": pad_sequence([row["labels"] for row in rows], True, padding_value=IGNORED),
    }


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24, padding_idx=0)
        self.before = nn.Conv1d(24, 48, 3, padding=1)
        self.tags = nn.Linear(48, TAGS)

    def forward(self, words, labels=None):
        hidden = self.before(self.embedding(words).transpose(1, 2)).relu()
        return {"logits": self.tags(hidden.transpose(1, 2))}


def loss_of_words(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"].flatten(0, 1)
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    words = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return total / words


def compute_metrics(prediction):
    told = prediction.label_ids != IGNORED
    right = (prediction.predictions.argmax(-1) == prediction.label_ids)[told]
    return {"accuracy": float(right.mean()), "words": int(told.sum())}


class KeepWeights(TrainerCallback):
    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:
            os.makedirs(args.output_dir, exist_ok=True)
            path = os.path.join(args.output_dir, f"weights-{state.epoch:.0f}.pt")
            torch.save(model.state_dict(), path)


def main():
    set_seed(21)
    training_args = TrainingArguments(
        output_dir="tagger",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=int(os.environ.get("TRAIN_BATCH", "8")),
        per_device_eval_batch_size=8,
        learning_rate=1e-2,
        warmup_steps=6,
        lr_scheduler_type="linear",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=4,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=Tagger(),
        args=training_args,
        data_collator=collate,
        train_dataset=Sentences(192, 0),
        eval_dataset=Sentences(48, 1, lengths=(12, 12)),
        compute_loss_func=loss_of_words,
        compute_metrics=compute_metrics,
        callbacks=[KeepWeights()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
