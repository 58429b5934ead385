"""Write what TRL trains on in conversations of several turns, by the chat templates of some model families.

    python tests/scripts/make_training_turns.py

Copies original templates from the installed TRL into tests/fixtures/chat_templates, and writes training_turns.json there:
for each template its special tokens and conversations, with the text of TRL's template for training and the parts of it that
are scored (`return_assistant_tokens_mask`). Two kinds of characters are taken off the scored parts: those that the
generation prompt has written already (`<think>` of Qwen 3.5, a header), and whitespace behind the token that ends the turn.
The date is taken out of gpt-oss's system message. Needs trl==1.16.0 and transformers==5.24.0, without torch.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "chat_templates"
TRL = Path(find_spec("trl").origin).parent / "chat_templates"

CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
DEEPSEEK = [f"<｜{name}｜>" for name in (
    "begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin",
    "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end")]
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"]
PHI = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"]

# name, end of text, special tokens, whether it has tools, where it reads reasoning
TEMPLATES = [
    ("qwen2_5", "<|im_end|>", CHATML, True, None),
    ("qwen3", "<|im_end|>", CHATML, True, "content"),
    ("qwen3_5_think", "<|im_end|>", CHATML, True, "content"),
    ("qwen3_5_nothink", "<|im_end|>", CHATML, True, "content"),
    ("gptoss", "<|return|>", HARMONY, True, "thinking"),
    ("phi3", "<|endoftext|>", PHI, False, None),
    ("deepseekv3", "<｜end▁of▁sentence｜>", DEEPSEEK, True, None),
    ("deepseek_r1_distill", "<｜end▁of▁sentence｜>", DEEPSEEK, False, "r1"),
    ("llama3", "<|eot_id|>", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], False, None),
    ("gemma3", "<eos>", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], False, None),
]
NAMED = {"<|begin_of_text|>": "bos_token", "<bos>": "bos_token", "<｜begin▁of▁sentence｜>": "bos_token"}

TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}, "required": ["a"]}}}]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def call(**arguments):
    return [{"type": "function", "function": {"name": "add", "arguments": arguments}}]


def conversations(tools, reasoning):
    u = [turn("user", text) for text in ("do it", "go on, <b>please</b>", "and now?")]
    yield [u[0], turn("assistant", "step one"), u[1], turn("assistant", "step two")], None
    yield [u[0], turn("assistant", "<one>"), u[1], turn("assistant", "two\n\ntwo"), u[2], turn("assistant", "die drei: ä🦙")], None
    # ends with a question; words of the user in a turn
    yield [u[0], turn("assistant", "do it"), u[1], turn("assistant", "do it"), u[2]], None

    def thought(text, words):
        if reasoning == "thinking":
            return turn("assistant", words, thinking=text)
        return turn("assistant", f"<think>\n{text}\n</think>\n\n{words}")

    if reasoning:
        yield [u[0], thought("hm", "step one"), u[1], thought("so", "step two")], None
        yield [u[0], turn("assistant", "step one"), u[1], thought("so", "step two")], None
        yield [u[0], thought("hm", "step one"), u[1], turn("assistant", "step two")], None
    if reasoning == "content":
        def own(text, words):
            return turn("assistant", words, reasoning_content=text)
        yield [u[0], own("hm", "step one"), u[1], own("so", "step two")], None
    if tools:
        first = turn("assistant", "", tool_calls=call(a=2, s="x"))
        answer = turn("tool", "4711", name="add")
        yield [u[0], first, answer, turn("assistant", "it is 4711")], TOOLS
        yield [u[0], first, answer, turn("assistant", "it is 4711"), u[1], turn("assistant", "again")], TOOLS
        yield [u[0], first, answer, turn("assistant", "so"), u[1],
               turn("assistant", "", tool_calls=call(a=3)), answer, turn("assistant", "done")], TOOLS


def render(template, messages, tools, names, **more):
    return render_jinja_template([messages], tools=tools, chat_template=template, **names, **more)


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def scored(training, messages, tools, names):
    (text,), (spans,) = render(training, messages, tools, names, return_assistant_tokens_mask=True)
    # spans that follow each other are one
    joined = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    spans = joined
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    assert len(turns) == len(spans), (turns, spans)
    parts = []
    for i, (start, end) in zip(turns, spans):
        # the generation prompt behind the last words before the turn
        (prompt,), _ = render(training, messages[:i], tools, names, add_generation_prompt=True)
        at = prompt.rindex(messages[i - 1]["content"]) + len(messages[i - 1]["content"])
        words = text.rindex(messages[i - 1]["content"], 0, start) + len(messages[i - 1]["content"])
        seen = common(prompt[at:], text[words:])
        if at + seen < len(prompt) and text[words + seen - 1] == "<":
            seen -= 1  # another tag than the prompt's
        start = max(start, words + seen)
        parts.append(text[start:end].rstrip())
    return re.sub(r"Current date: [-\d]+", "Current date: 0", text), parts


def main():
    cases = []
    for name, eos, special, tools, reasoning in TEMPLATES:
        original = (TRL / f"{name}.jinja").read_text(encoding="utf-8")
        training = (TRL / f"{name}_training.jinja").read_text(encoding="utf-8")
        (FIXTURES / f"{name}.jinja").write_text(original, encoding="utf-8")
        names = {"eos_token": eos, **{role: token for token, role in NAMED.items() if token in special}}
        own = []
        for messages, given in conversations(tools, reasoning):
            text, parts = scored(training, messages, given, names)
            own.append({"messages": messages, "tools": given, "text": text, "scored": parts})
        cases.append({"template": name, "names": names, "special": special, "conversations": own})
        print(name, len(own))
    out = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (FIXTURES / "training_turns.json").write_text(f"[\n{out}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
