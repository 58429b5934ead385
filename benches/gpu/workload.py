"""The models, prompts and settings that both sides of a comparison read."""

import json
import random
from pathlib import Path

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
# Qwen2.5-0.5B and 1.5B by their config.json.
MODELS = {
    "0.5B": QWEN
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": QWEN
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
SMALL_MODELS = {
    "small": QWEN
    | {
        "vocab_size": 2048,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
    },
}
# SmolLM2-135M by its config.json: what a laptop's user trains first.
SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# A GRPO step: prompts, completions of each, tokens of both, and sequences of a micro-batch.
STEP = {"prompts": 64, "n": 8, "prompt_tokens": 128, "new_tokens": 512, "micro_batch": 16}
SMALL_STEP = {"prompts": 4, "n": 4, "prompt_tokens": 24, "new_tokens": 24, "micro_batch": 8}
# Sequences and tokens of each in an update under every memory technique.
UPDATE = {"sequences": 8, "length": 512}
SMALL_UPDATE = {"sequences": 4, "length": 48}


def models(small: bool) -> dict[str, dict]:
    return SMALL_MODELS if small else MODELS


def decoded(small: bool) -> list[tuple[str, dict, int]]:
    """Models and sequences of the decoding steps that are timed."""
    if small:
        return [("small", SMALL_MODELS["small"], 8)]
    return [("0.5B", MODELS["0.5B"], rows) for rows in (64, 512)] + [("135M", SMOLLM2, 512)]


def step(small: bool) -> dict[str, int]:
    return SMALL_STEP if small else STEP


def update(small: bool) -> dict[str, int]:
    return SMALL_UPDATE if small else UPDATE


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One token a word, `w1` to `wN` by their ids. There is no end token, so that no completion ends before its limit."""
    words = {"<unk>": 0} | {f"w{i}": i for i in range(1, vocabulary)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def prompts(vocabulary: int, sizes: dict[str, int]) -> list[list[int]]:
    """Token ids of every prompt."""
    draw = random.Random(0)
    one = lambda: [draw.randrange(1, vocabulary) for _ in range(sizes["prompt_tokens"])]
    return [one() for _ in range(sizes["prompts"])]


def write_prompts(path: Path, rows: list[list[int]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for ids in rows:
            file.write(json.dumps({"prompt": " ".join(f"w{i}" for i in ids), "answer": "w7"}) + "\n")


def step_config(folder: Path, arch: dict, sizes: dict[str, int], device: str, precision: str, steps: int) -> dict:
    """Firebrick's configuration of the step: the planner's choice, old log-probs from the sampler."""
    tokens = sizes["prompt_tokens"] + sizes["new_tokens"]
    sequences = sizes["prompts"] * sizes["n"]
    return {
        "model": {"arch": arch, "tokenizer": str(folder / "tokenizer")},
        "task": {
            "kind": "jsonl",
            "train": str(folder / "prompts.jsonl"),
            "prompt": "{prompt}",
            "answer_field": "answer",
            "rewards": [{"kind": "regex", "pattern": "7.?$"}],
        },
        "output": str(folder / "run"),
        "device": device,
        "precision": precision,
        "objective": {"name": "grpo", "adv_eps": 1e-4},
        "rollout": {
            "n": sizes["n"],
            "prompt_length": sizes["prompt_tokens"],
            "response_length": sizes["new_tokens"],
            "max_num_seqs": sequences,
            "max_num_batched_tokens": max(8192, sequences),
        },
        "memory": {
            "budget": "auto",
            "train_tokens": sizes["micro_batch"] * tokens,
            "micro_batch_size": sizes["micro_batch"],
            "recover": False,
        },
        "update": {"old_log_probs": "sampler"},
        "optim": {"lr": 1e-6, "weight_decay": 0.0},
        "trainer": {"steps": steps, "train_batch_size": sizes["prompts"], "save_freq": -1},
    }


def growth_config(folder: Path, device: str, steps: int) -> dict:
    """A tiny model that learns sums while everything that can move moves between host and device."""
    return {
        "model": {
            "arch": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 32,
            }
        },
        "task": {"kind": "arithmetic", "difficulty": 1, "validation_size": 4, "partial": True},
        "output": str(folder / "run"),
        "device": device,
        "rollout": {"n": 4, "prompt_length": 4, "response_length": 3},
        "memory": {
            "gradient_checkpointing": True,
            "activation_offload": True,
            "grad_offload": True,
            "optimizer_offload": "idle",
        },
        "optim": {"lr": 1e-3},
        "trainer": {"steps": steps, "train_batch_size": 4, "save_freq": -1},
    }
