"""The same reward files, unchanged, under TRL, under verl and under Firebrick: rewards of 500 completions, compared to the bit.

    tests/campaigns/run reward_parity [--judge PROGRAM] [--python PYTHON] [--record]

The files are tests/fixtures/rewards/functions/for_trl.py and for_verl.py. Completions are made from GSM8K's answers: right, wrong, empty,
without a number, with more numbers behind. TRL's side is GRPOTrainer's own call of its functions, once with texts and once with
conversations; verl's is its NaiveRewardManager with the function that `get_custom_reward_fn` loads. Firebrick's is the example program
`judge`, which asks the worker processes that a run asks. TRL keeps rewards as 32-bit floats: ours are rounded to that before they are
compared; verl's are compared as they are, with all that the functions report beside them.

Both engines are installed from the Python registry into a temporary folder (some gigabytes, with PyTorch), verl without those of its
dependencies that its reward code does not import; PYTHON is one that has them. --record writes the rows and rewards that CI compares with.
"""

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures"
FUNCTIONS = FIXTURES / "rewards/functions"
MODEL = FIXTURES / "models/qwen2-tied"
RECORDED = FIXTURES / "rewards/function_scores.jsonl"
PACKAGES = [
    "torch==2.15.0", "transformers==5.23.0", "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0",
    # of verl's own list, what its reward code imports
    "ray==2.49.2", "aiohttp", "tensordict==0.10.0", "hydra-core==1.3.2", "codetiming==1.4.0", "dill", "pandas",
]
VERL = "verl==0.9.1"
PROMPTS, GROUP = 125, 4
TRL_NAMES = ["right", "form", "near", "length", "first_letter"]
VERL_NAMES = ['compute_score?{"partial": 0.1}', "near", "strict", "detailed"]


def completion(answer, rng):
    """A text with some answer, and how it came about."""
    number = int(answer.replace(",", ""))
    wrong = rng.choice([number + 1, -number, number * 10, number + 0.5])
    said = rng.choice([str(number), f"{number:,}", f"{number}.0", str(wrong), f"{wrong:,}"])
    return rng.choice([
        f"3 * 4 = 12, so we have {said}.\n#### {said}", f"#### {said}", f"The answer is {said}", f"{said}", f"{said} of 100 %", "",
        "I do not know.", "  ", f"é – {said} €\n", f"\n\n{said}\n#### {number}", f"<think>{number}</think> {said}!", f"#### {said}\n",
        "No number\nat all\n", f"{said}, {number - 3} or {number + 3}", f"-{said}", "####", f"#### {said}.",
    ])


def make_rows():
    """Rows with completions, four of each prompt; a solution is missing here and there."""
    from_gsm8k = (FIXTURES / "gsm8k/train.jsonl").open(encoding="utf-8").read().splitlines()
    rng, ids = random.Random(0), random.Random(1)
    for index, line in enumerate(from_gsm8k[:PROMPTS]):
        answer = json.loads(line)["answer"].split("####")[-1].strip().replace(",", "")
        question = json.loads(line)["question"].split(". ")[0][:60]
        for _ in range(GROUP):
            yield {
                "data_source": "openai/gsm8k", "prompt": f"{index}: {question}", "solution": None if index % 9 == 8 else answer,
                "index": index, "reward_model": {"style": "rule", "ground_truth": answer}, "extra_info": {"index": index},
                "completion": completion(answer, rng), "completion_ids": [ids.randrange(200) for _ in range(ids.randrange(1, 40))],
            }


def chat(row):
    """The row with a conversation for a prompt."""
    return {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def ours(program, rows, file, names, seconds):
    rewards = []
    for name in names:
        name, _, kwargs = name.partition("?")
        rewards.append({
            "kind": "python", "name": name, "file": str(file), "function": name, "kwargs": json.loads(kwargs or "{}"),
            "python": sys.executable,
        })
    task = {"kind": "dataset", "train": str(rows), "rewards": rewards}
    done = subprocess.run([program, json.dumps(task)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    seconds.append(done.stderr.strip())
    return [json.loads(line) for line in done.stdout.splitlines()]


def theirs(python, who, rows, file, names):
    program = ROOT / "tests/campaigns/support/reward_peers.py"
    done = subprocess.run([python, str(program), who, str(rows), str(MODEL), str(file), *names], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def bits(value, of):
    return None if value is None else struct.pack(of, value)


def compare(what, mine, other, of, extra_of):
    """How many of the rewards are the same; each other one is printed."""
    same = total = 0
    for at, (our, their) in enumerate(zip(mine, other, strict=True)):
        for name, wanted in their.items():
            total += 1
            found = our[name]
            is_same = "reward" in found and bits(found["reward"], of) == bits(wanted["reward"], of)
            is_same &= extra_of(name, found) == extra_of(name, wanted)
            same += is_same
            if not is_same:
                print(f"{what}: row {at}, {name}: {found} instead of {wanted}")
    judged = sum(wanted["reward"] is not None for their in other for wanted in their.values())
    print(f"{'ok' if same == total else 'FAILED':8}{what}: {len(mine)} completions, {total} rewards ({total - judged} do not apply), {same} the same")
    return same == total


def install(folder):
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(Path(folder) / "bin/python")
    for packages in (PACKAGES, ["--no-deps", VERL]):
        print(f"        installing {' '.join(packages)}", flush=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def built():
    subprocess.run(["cargo", "build", "--release", "--no-default-features", "--example", "judge"], cwd=ROOT, check=True)
    about = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, capture_output=True, check=True)
    return str(Path(json.loads(about.stdout)["target_directory"]) / "release/examples/judge")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", help="the example program `judge`, built; cargo builds it where absent")
    parser.add_argument("--python", help="a Python that has TRL and verl")
    parser.add_argument("--record", action="store_true", help="write rows and rewards for CI")
    options = parser.parse_args()
    judge = options.judge or built()
    rows, seconds, good = list(make_rows()), [], True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = options.python or install(folder / "venv")
        texts, chats = write(folder / "texts.jsonl", rows), write(folder / "chats.jsonl", map(chat, rows))
        file = FUNCTIONS / "for_trl.py"
        answered = [{**row, "completion": [{"role": "assistant", "content": row["completion"]}]} for row in map(chat, rows)]
        # what a function logs by log_extra is the whole table's there and the reward's own here
        logged = lambda name, said: said["extra"].get("tokens") if name == "length" else None
        trl = theirs(python, "trl", texts, file, TRL_NAMES)
        good &= compare("TRL, texts", ours(judge, texts, file, TRL_NAMES, seconds), trl, "<f", logged)
        conversations = theirs(python, "trl", write(folder / "answered.jsonl", answered), file, TRL_NAMES)
        good &= compare("TRL, conversations", ours(judge, chats, file, TRL_NAMES, seconds), conversations, "<f", logged)
        file = FUNCTIONS / "for_verl.py"
        # verl counts a plain number under `acc`
        reported = lambda name, said: {k: v for k, v in said["extra"].items() if name in ("compute_score", "detailed")}
        verl = theirs(python, "verl", texts, file, VERL_NAMES)
        good &= compare("verl", ours(judge, chats, file, VERL_NAMES, seconds), verl, "<d", reported)
    print(f"{'ok' if trl == conversations else 'FAILED':8}TRL says the same of texts and of conversations; ours {', '.join(seconds)}")
    if options.record:
        lines = ({"row": row, "trl": a, "verl": b} for row, a, b in zip(rows, trl, verl, strict=True))
        write(RECORDED, lines)
    sys.exit(not good)


if __name__ == "__main__":
    main()
