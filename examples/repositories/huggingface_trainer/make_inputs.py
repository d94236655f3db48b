"""Write a tiny GPT-2, its tokenizer and a data set beside this script, without any download."""

import pathlib
import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
WORDS = ("the", "cat", "dog", "bird", "sees", "hears", "a", "tree", "house", "river", "runs")


def main():
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=12)) for _ in range(400)]
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", "[PAD]"])
    tokenizer.train_from_iterator(lines, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]"
    )
    config = GPT2Config(
        vocab_size=len(fast), n_positions=32, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=fast.pad_token_id, eos_token_id=fast.pad_token_id,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(HERE / "model")
    fast.save_pretrained(HERE / "model")
    Dataset.from_dict({"text": lines}).save_to_disk(HERE / "data")


if __name__ == "__main__":
    main()
