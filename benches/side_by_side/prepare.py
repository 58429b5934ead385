"""Make the random checkpoint and the prompts that both sides read.

    prepare.py FOLDER --size base|wide

FOLDER/model is a Llama checkpoint of random weights with a tokenizer of one token a word; FOLDER/prompts.jsonl has
one row {"prompt", "answer"} a prompt, 64 words each.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
PROMPTS = 256
PROMPT_TOKENS = 64
SIZES = {
    "base": {"hidden_size": 256, "intermediate_size": 704},
    "wide": {"hidden_size": 1024, "intermediate_size": 2816},
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(3, VOCABULARY)]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="base")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
        **SIZES[args.size],
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(args.folder / "model")
    tokenizer().save_pretrained(args.folder / "model")

    draw = random.Random(0)
    with open(args.folder / "prompts.jsonl", "w", encoding="utf-8") as file:
        for _ in range(PROMPTS):
            words = [f"w{draw.randrange(3, VOCABULARY)}" for _ in range(PROMPT_TOKENS)]
            file.write(json.dumps({"prompt": " ".join(words), "answer": "w7"}) + "\n")


if __name__ == "__main__":
    main()
