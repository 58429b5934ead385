"""Write the supervised loss that transformers computes on rows of chats and of prompts with completions.

    python tests/scripts/make_sft_fixture.py

Writes tests/fixtures/sft/rows.json. A case names a model folder and, where it is not the folder's own, a chat template;
it has rows, the tokens of each, which of them are scored (`apply_chat_template(return_assistant_tokens_mask=True)`), and the
mean negative log-likelihood of all scored tokens in float64. Needs tests/scripts/requirements.txt.

No span ends with a character of several tokens: transformers marks the first of them alone, Firebrick all.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"

# The folder's own ChatML, the assistant's words and its end marked.
QWEN = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Llama 3's, over several lines, the words alone marked.
LLAMA = """{{ bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message['role'] == 'assistant' -%}
        {% generation %}{{ message['content'] | trim }}{% endgeneration %}
    {%- else -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""


def chats():
    lines = (FIXTURES / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:9]]

    def turn(role, text):
        return {"role": role, "content": text}

    def pair(i, n):
        return [turn("user", rows[i]["question"][: 10 + 4 * n]), turn("assistant", rows[i]["answer"][:n])]

    return [
        pair(0, 30),
        pair(1, 12) + pair(2, 25) + pair(3, 7),
        [turn("system", "Be brief.")] + pair(4, 18),
        pair(5, 3) + pair(6, 41),
        [turn("user", "Say it."), turn("assistant", "  spaces, and a naïve “quote” 🦙. ")],
        pair(7, 60) + [turn("user", "And then?")],
        pair(8, 1),
    ]


def templated(tokenizer, messages, template):
    out = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
    return out["input_ids"], out["assistant_masks"]


@torch.no_grad()
def loss(folder, tokens, scored):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval().double()
    total, count = 0.0, 0
    for ids, mask in zip(tokens, scored):
        labels = torch.tensor([[t if m else -100 for t, m in zip(ids, mask)]])
        count += sum(mask[1:])
        total += model(input_ids=torch.tensor([ids]), labels=labels).loss.item() * sum(mask[1:])
    return total / count


def main():
    cases = []

    def add(name, model, template, rows, pairs):
        tokens, scored = [list(p) for p in zip(*pairs)]
        cases.append({
            "name": name, "model": model, "chat_template": template, "rows": rows, "tokens": tokens, "scored": scored,
            "loss": loss(FIXTURES / "models" / model, tokens, scored),
        })

    rows = chats()
    messages = [{"messages": m} for m in rows]
    qwen = AutoTokenizer.from_pretrained(FIXTURES / "models" / "qwen2-tied")
    pairs = [templated(qwen, m, QWEN) for m in rows]
    for m in rows:
        own = qwen.apply_chat_template(m, tokenize=False)
        assert own == qwen.apply_chat_template(m, chat_template=QWEN, tokenize=False)
    add("ChatML with marks", "qwen2-tied", QWEN, messages, pairs)
    add("ChatML without marks", "qwen2-tied", None, messages, pairs)

    llama = AutoTokenizer.from_pretrained(FIXTURES / "models" / "llama-gqa")
    add("Llama 3 with marks", "llama-gqa", LLAMA, messages, [templated(llama, m, LLAMA) for m in rows])

    texts, pairs = [], []
    for m in rows:
        prompt, completion = m[-2]["content"] + "\n", m[-1]["content"]
        ids = llama(prompt)["input_ids"]
        own = llama(completion, add_special_tokens=False)["input_ids"] + [llama.eos_token_id]
        texts.append({"prompt": prompt, "completion": completion})
        pairs.append((ids + own, [0] * len(ids) + [1] * len(own)))
    add("prompts with completions", "llama-gqa", None, texts, pairs)

    # the completion of a conversation: its turns alone are scored
    split = [{"prompt": m[:-1], "completion": m[-1:]} for m in rows if m[-1]["role"] == "assistant"]
    pairs = []
    for m in rows:
        if m[-1]["role"] != "assistant":
            continue
        ids, mask = templated(qwen, m, QWEN)
        first = len(qwen.apply_chat_template(m[:-1], add_generation_prompt=True, return_dict=True)["input_ids"])
        pairs.append((ids, [0] * first + mask[first:]))
    add("conversations with a completion", "qwen2-tied", None, split, pairs)

    out = FIXTURES / "sft"
    out.mkdir(exist_ok=True)
    golden = {"format": "sft-rows/1", "cases": cases}
    (out / "rows.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n", encoding="utf-8")
    for case in cases:
        print(f"{case['name']}: {len(case['rows'])} rows, {sum(map(sum, case['scored']))} scored tokens, loss {case['loss']:.6f}")


if __name__ == "__main__":
    main()
