"""Write rollouts of several turns with tool calls, by the chat templates of some model families.

    python tests/scripts/make_tool_turns.py

Writes tests/fixtures/chat_templates/tool_turns.json: for each template the parts of a conversation in which the model calls
a tool, as text and as token ids of the small vocabulary in tests/fixtures/tokenizers/qwen with the family's special tokens.
The text is that of TRL's template for training. What is between two turns is compared with
`GRPOTrainer._get_tool_suffix_ids`, and the calls are those of TRL's `parse_response`; DeepSeek has neither in TRL. The date
is taken out of gpt-oss's system message. Needs trl==1.16.0, transformers==5.24.0 and torch.
"""

import copy
import json
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

from make_training_turns import CHATML, DEEPSEEK, FIXTURES, HARMONY, NAMED, TRL
from transformers import AutoTokenizer
from trl.chat_template_utils import add_response_schema, parse_response
from trl.trainer.grpo_trainer import GRPOTrainer

TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds.",
    "parameters": {"type": "object", "properties": {
        "a": {"type": "integer", "description": "One."}, "s": {"type": "string", "description": "Text."},
        "l": {"type": "array", "items": {"type": "number"}, "description": "List."}}, "required": ["a"]}}}]
DATE = re.compile(r"Current date: [-\d]+")

# name, end of text, special tokens, where it reads reasoning
TEMPLATES = [
    ("qwen2_5", "<|im_end|>", CHATML, None),
    ("qwen3", "<|im_end|>", CHATML, "content"),
    ("qwen3_5_think", "<|im_end|>", CHATML, "content"),
    ("qwen3_5_nothink", "<|im_end|>", CHATML, "none"),
    ("gptoss", "<|return|>", HARMONY, "thinking"),
    ("deepseekv3", "<｜end▁of▁sentence｜>", DEEPSEEK, "deepseek"),
]


def call(**arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def turn(reasoning, thought, words, calls=None):
    message = {"role": "assistant", "content": words}
    if reasoning == "content":
        message["content"] = f"<think>\n{thought}\n</think>\n\n{words}"
    elif reasoning == "none":
        message["content"] = f"<think>\n\n</think>\n\n{words}"
    elif reasoning == "thinking":
        message["thinking"] = thought
    elif reasoning == "deepseek" and calls:
        message["content"] = f"<think>\n{thought}\n</think>\n\n{words}"
    if calls:
        message["tool_calls"] = calls
    return message


def answer(text):
    return {"role": "tool", "name": "add", "content": text}


def conversation(name, reasoning):
    """The question, then for each turn of the model the turn and the answers to its calls."""
    first, second = call(a=2, s="x 'y'\n\"z\""), call(a=3, l=[1, 2.5])
    both = [first, second] if name != "gptoss" else [first]
    yield [{"role": "user", "content": "do it"}]
    yield [turn(reasoning, "hm", "", both)] + [answer("4711"), answer("<b>ä</b>\n")][: len(both)]
    if name != "deepseekv3":  # its template writes a second turn of calls in another way
        yield [turn(reasoning, "so", "", [second]), answer('{"error": "no"}')]
    yield [turn(reasoning, "ah", "it is 4711")]


def tokenizer_of(name, eos, special):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        shutil.copy(FIXTURES.parent / "tokenizers/qwen/tokenizer.json", folder)
        names = {"eos_token": eos, **{role: token for token, role in NAMED.items() if token in special}}
        config = {**names, "extra_special_tokens": special, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text((TRL / f"{name}.jinja").read_text(encoding="utf-8"))
        return AutoTokenizer.from_pretrained(folder), names


def parts_of(name, eos, special, reasoning):
    tokenizer, names = tokenizer_of(name, eos, special)
    training = (TRL / f"{name}_training.jinja").read_text(encoding="utf-8")
    if name != "deepseekv3":
        tokenizer = add_response_schema(tokenizer)

    def render(messages, prompt):
        text = tokenizer.apply_chat_template(
            messages, tools=TOOLS, chat_template=training, add_generation_prompt=prompt, tokenize=False)
        return DATE.sub("Current date: 0", text)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def behind(whole, start, what):
        assert whole.startswith(start), f"{name}: {what} of {whole!r} is not behind {start!r}"
        return whole[len(start):]

    steps = list(conversation(name, reasoning))
    told = copy.deepcopy(steps[0])
    text = render(told, True)
    parts = [{"text": text, "ids": ids(text)}]
    for step in steps[1:]:
        message, answers = step[0], step[1:]
        prompt, whole = render(told, True), render([*told, message], False)
        if not whole.startswith(prompt):  # gpt-oss: reasoning before earlier calls is dropped
            prompt, whole = render(steps[0], True), render([*steps[0], message], False)
        words = behind(whole, prompt, "turn")
        end = max(words.rfind(token) + len(token) for token in (eos, "<|call|>") if token in words)
        words = words[:end]
        part = {"text": words, "ids": ids(words)}
        if name != "deepseekv3":
            found = parse_response(tokenizer, part["ids"], prefix=ids(prompt), tools=TOOLS)
            part["calls"] = [one["function"] for one in found.get("tool_calls") or []]
        else:
            part["calls"] = [one["function"] for one in message.get("tool_calls") or []]
        parts.append(part)
        told.append(message)
        if answers:
            between = behind(behind(render([*told, *answers], True), render(told[:-1], True), "answer"), words, "answer")
            part = {"text": between, "ids": ids(between), "answers": [one["content"] for one in answers]}
            if name != "deepseekv3":
                trainer = SimpleNamespace(
                    processing_class=tokenizer, _tokenizer=tokenizer, chat_template=training, chat_template_kwargs={}, _is_vlm=False)
                assert GRPOTrainer._get_tool_suffix_ids(trainer, answers) == part["ids"], name
            parts.append(part)
            told.extend(answers)
    return {"template": name, "names": names, "special": special, "tools": TOOLS, "parts": parts}


def main():
    cases = [parts_of(*one) for one in TEMPLATES]
    out = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (FIXTURES / "tool_turns.json").write_text(f"[\n{out}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
