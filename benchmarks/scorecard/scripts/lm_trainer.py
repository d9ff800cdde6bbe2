"""Masked-token pretraining of a tiny BERT with the Hugging Face Trainer."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

VOCABULARY, LENGTH, MASK = 512, 48, 1


class MaskedLines(Dataset):
    def __init__(self, lines=20_000):
        generator = torch.Generator().manual_seed(2)
        self.lines = torch.randint(2, VOCABULARY, (lines, LENGTH), generator=generator)
        self.masked = torch.rand(lines, LENGTH, generator=generator) < 0.15

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, idx):
        tokens, masked = self.lines[idx], self.masked[idx]
        input_ids = tokens.masked_fill(masked, MASK)
        # <sample x=input_ids i=idx>
        return {"input_ids": input_ids, "labels": tokens.masked_fill(~masked, -100)}


class PretrainingTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        # <batch x=inputs["input_ids"]>
        outputs = model(**inputs)
        loss = outputs["loss"]
        # <loss loss=loss again=model.module(**inputs) x=inputs["input_ids"]>
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        # <backward loss=loss>
        return loss


def main():
    set_seed(0)
    # <start>
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    bert = BertForMaskedLM(config)
    # <model model=bert>
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=100_000,
            per_device_train_batch_size=16,
            learning_rate=5e-4,
            save_strategy="no",
            logging_steps=500,
            disable_tqdm=True,
            report_to="none",
            ddp_find_unused_parameters=False,
        )
        PretrainingTrainer(model=bert, args=arguments, train_dataset=MaskedLines()).train()


if __name__ == "__main__":
    main()
