"""Make the random checkpoint and the prompts that both sides read.

    prepare.py FOLDER --size base|wide|ragged|long|real

FOLDER/model is a Llama checkpoint of random weights with a tokenizer of one token a word and the size's end tokens;
FOLDER/prompts.jsonl has one row {"prompt", "answer"} a prompt.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from sizes import EOS, PAD, SIZES, UNK, Size
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROMPTS = 256


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(UNK + 1, vocabulary)]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model(size: Size) -> LlamaForCausalLM:
    torch.manual_seed(0)
    ends = {"pad_token_id": PAD, "eos_token_id": size.end_ids if len(size.end_ids) > 1 else EOS, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_key_value_heads,
        max_position_embeddings=max(256, size.length),
        tie_word_embeddings=size.tie_word_embeddings,
        **ends,
    )
    random_model = LlamaForCausalLM(config).to(torch.float32)
    if len(size.end_ids) > 1:
        # small logits: the chance of an end is then that of the end tokens' share of the vocabulary
        random_model.lm_head.weight.data.mul_(0.1)
    random_model.generation_config = GenerationConfig(**ends)
    return random_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="base")
    args = parser.parse_args()

    size = SIZES[args.size]
    model(size).save_pretrained(args.folder / "model")
    tokenizer(size.vocab_size).save_pretrained(args.folder / "model")

    draw = random.Random(0)
    with open(args.folder / "prompts.jsonl", "w", encoding="utf-8") as file:
        for _ in range(PROMPTS):
            length = draw.randint(*size.prompt_tokens)
            words = [f"w{draw.randrange(UNK + 1, size.vocab_size)}" for _ in range(length)]
            file.write(json.dumps({"prompt": " ".join(words), "answer": "w7"}) + "\n")


if __name__ == "__main__":
    main()
