"""Write tiny random reward models together with the scores that transformers gives.

    python tests/scripts/make_reward_fixture.py

Writes tests/fixtures/reward_models/NAME/: a `...ForSequenceClassification` checkpoint with one label, its tokenizer,
and `golden.json`. A case is a prompt (text, or messages) with a completion, what the model reads of it (`input`), the
token ids of that, and the score in float32 and float64 of the row by itself. Needs tests/scripts/requirements.txt.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SEED = 20261121
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
COMMON = {
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
    "intermediate_size": 40, "max_position_embeddings": 256, "rope_theta": 10000.0, "vocab_size": 512, "use_cache": False,
} | ONE_LABEL

# The tied flag of a config says nothing here: a scorer has no head to tie. `pad` is the token that the convention skips.
CASES = {
    "qwen2-chat": (
        COMMON | {"architectures": ["Qwen2ForSequenceClassification"], "model_type": "qwen2", "tie_word_embeddings": True,
                  "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "rms_norm_eps": 1e-6},
        "qwen", True, "<|endoftext|>", torch.float32),
    "llama-text": (
        COMMON | {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "tie_word_embeddings": False,
                  "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
                  "head_dim": 16, "attention_bias": False, "mlp_bias": False},
        "llama3", False, "<|eot_id|>", torch.bfloat16),
}


def questions():
    lines = (FIXTURES / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:12]]


def weights(model, generator):
    """Scales under which attention, positions and every layer matter."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("norm.weight"):
                p.copy_(1.0 + 0.1 * noise)
            elif name == "model.embed_tokens.weight":
                p.copy_(0.5 * noise)
            elif name == "score.weight":
                p.copy_(0.25 * noise)
            elif name.endswith("bias"):
                p.copy_(0.2 * noise)
            else:
                p.copy_(1.2 / math.sqrt(p.shape[1]) * noise)


@torch.no_grad()
def score(folder, ids, dtype):
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = model.eval().to(dtype)
    return model(input_ids=torch.tensor([ids])).logits[0, 0].item()


def inputs(tokenizer, chats, pad):
    rows = questions()
    cases = []
    for i, (row, length) in enumerate(zip(rows, [0, 3, 9, 30, 60, 12, 1, 24])):
        completion = row["answer"][:length]
        messages = [{"role": "user", "content": row["question"][: 20 + 12 * i]}]
        if i % 3 == 2:
            messages.insert(0, {"role": "system", "content": "Judge kindly."})
        text = messages[-1]["content"] + "\n"
        if chats:
            turns = messages + [{"role": "assistant", "content": completion}]
            rendered = tokenizer.apply_chat_template(turns, tokenize=False)
            ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
            cases.append({"input": "chat", "messages": messages, "completion": completion, "ids": ids})
        ids = tokenizer(text + completion)["input_ids"]
        cases.append({"input": "text", "prompt": text, "completion": completion, "ids": ids})
        prompt = tokenizer(text)["input_ids"]
        ids = prompt + tokenizer(completion, add_special_tokens=False)["input_ids"]
        # every other row ends with the padding token: the score is that of the token before it
        ids = ids + [pad] * (i % 2)
        cases.append({"input": "tokens", "prompt_ids": prompt, "completion_ids": ids[len(prompt):], "ids": ids})
    return cases


def main():
    for name, (config, tokenizer, chats, pad, dtype) in CASES.items():
        out = FIXTURES / "reward_models" / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for file in (FIXTURES / "tokenizers" / tokenizer).iterdir():
            shutil.copy(file, out)
        if not chats:
            path = out / "tokenizer_config.json"
            settings = json.loads(path.read_text(encoding="utf-8"))
            settings.pop("chat_template")
            path.write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        tok = AutoTokenizer.from_pretrained(out)
        pad_id = tok.convert_tokens_to_ids(pad)
        config = config | {"pad_token_id": pad_id, "torch_dtype": str(dtype).removeprefix("torch.")}
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(out))
        weights(model, torch.Generator().manual_seed(SEED))
        model.to(dtype).save_pretrained(out)
        # as written by hand above: save_pretrained leaves the number of labels to the default's absence
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        cases = inputs(tok, chats, pad_id)
        for case in cases:
            case["score"] = score(out, case["ids"], torch.float32)
            case["score_f64"] = score(out, case["ids"], torch.float64)
        apart = max(abs(c["score"] - c["score_f64"]) for c in cases)
        golden = {"format": "reward-model/1", "name": name, "cases": cases}
        (out / "golden.json").write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}: {len(cases)} cases, scores from {min(c['score'] for c in cases):.3f} "
              f"to {max(c['score'] for c in cases):.3f}, f32 within {apart:.1e} of f64")


if __name__ == "__main__":
    main()
