"""Fine-tune a causal language model from a local folder with the Trainer of Hugging Face."""

import argparse

from datasets import load_from_disk
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="model")
    parser.add_argument("--data", default="data")
    parser.add_argument("--output", default="output")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    data = load_from_disk(args.data).map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=32),
        batched=True,
        remove_columns=["text"],
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            logging_steps=20,
            save_steps=20,
            save_total_limit=2,
            report_to="none",
            seed=0,
        ),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    result = trainer.train(resume_from_checkpoint=_last(args.output))
    trainer.save_model(f"{args.output}/final")
    print(f"done after {result.global_step} steps, loss {result.training_loss:.4f}")


def _last(folder):
    try:
        return get_last_checkpoint(folder)
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    main()
