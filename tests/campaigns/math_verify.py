"""The rules `math` and `trl_accuracy` beside Math-Verify (https://github.com/huggingface/Math-Verify).

    tests/campaigns/run math_verify GSM8K [--out FILE] [--grade PROGRAM] [--python PYTHON]

GSM8K is a folder with the dataset's train.jsonl. 2,000 pairs are made from its gold answers, right and wrong ones in many spellings,
and 300 pairs made by hand are those of tests/fixtures/rewards/math_pairs.jsonl. Math-Verify is installed from the Python registry
into a temporary folder, unless PYTHON has it. Every disagreement is listed with who is right: a pair made from GSM8K is right by
construction, one made by hand as it says. TRL leaves out rows whose ground truth Math-Verify cannot parse: those are counted apart.
"""

import argparse
import collections
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.9.0"

# Run by the Python that has Math-Verify: pairs in, verdicts out.
JUDGE = '''
import json, sys
from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

LATEX = [LatexExtractionConfig(normalization_config=NormalizationConfig(units=True), boxed_match_priority=0,
                               try_extract_without_anchor=False)]
for line in sys.stdin:
    pair = json.loads(line)
    said = {}
    try:
        gold = parse(pair["gold"] if "$" in pair["gold"] or "boxed" in pair["gold"] else "$" + pair["gold"] + "$")
        said["math"] = bool(verify(gold, parse(pair["completion"])))
        said["gold"] = str(gold)
        # as TRL's accuracy_reward calls it
        gold = parse(pair["gold"])
        read = parse(pair["completion"], extraction_config=LATEX, extraction_mode="first_match")
        said["trl_accuracy"] = bool(verify(gold, read)) if gold else None
    except Exception as error:
        said["error"] = repr(error)
    print(json.dumps(said), flush=True)
'''


def spellings(number, rng):
    """Ways to write a whole number as a right answer."""
    plain, grouped = str(number), f"{number:,}"
    factor = rng.choice([2, 3, 4, 5, 10])
    choices = [
        plain, grouped, grouped.replace(",", "{,}"), f"{plain}.0", f"{plain}.00", f"\\frac{{{number * factor}}}{{{factor}}}",
        f"{number * factor}/{factor}", f"\\${grouped}", f"{plain}\\text{{ dollars}}", f"{plain} \\text{{ apples}}", f"x = {plain}",
        f"{number - 1} + 1", f"{plain}\\%", f"\\text{{{plain}}}", f"\\dfrac{{{number * factor}}}{{{factor}}}",
    ]
    return rng.choice(choices)


def completion(answer, rng):
    thought = rng.choice(["", "First 3 * 4 = 12. ", "We add $1 and $2.\n", "Let $x$ be the number.\n\n"])
    return thought + rng.choice([
        f"\\boxed{{{answer}}}", f"The answer is $\\boxed{{{answer}}}$.", f"So it is \\boxed{{{answer}}}, as wanted.",
        f"The final answer is ${answer}$. I hope it is correct.",
    ])


def gsm8k_pairs(folder, count, rng):
    lines = (folder / "train.jsonl").open().read().splitlines()
    for line in rng.sample(lines, count):
        gold = json.loads(line)["answer"].split("####")[-1].strip()
        number = int(gold.replace(",", ""))
        right = rng.random() < 0.6
        wrong = rng.choice([number + 1, number * 10, -number if number else 5, number + rng.randint(2, 40), 2 * number + 1])
        answer = spellings(number if right else wrong, rng)
        yield {"form": "gsm8k", "gold": gold, "completion": completion(answer, rng), "right": right}


def ours(program, rule, pairs):
    text = "".join(json.dumps({"answer": p["gold"], "completion": p["completion"]}) + "\n" for p in pairs)
    done = subprocess.run([program, json.dumps([{"kind": rule}])], input=text, text=True, capture_output=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def theirs(python, pairs):
    text = "".join(json.dumps(pair) + "\n" for pair in pairs)
    done = subprocess.run([python, "-c", JUDGE], input=text, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def install(folder):
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(Path(folder) / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", f"math-verify=={VERSION}", "antlr4-python3-runtime==4.13.2"], check=True)
    return python


def compare(rule, pairs, mine, other):
    counts, listed = collections.Counter(), []
    for pair, our, their in zip(pairs, mine, other, strict=True):
        group = "GSM8K" if pair["form"] == "gsm8k" else "by hand"
        counts[group, "pairs"] += 1
        own = our.get("reward", 0) > 0.5
        if rule == "trl_accuracy" and their.get(rule) is None:
            counts[group, "left out"] += 1
            counts[group, "left out, ours right"] += own == pair["right"]
            continue
        foreign = bool(their.get(rule))
        counts[group, "agree"] += own == foreign
        counts[group, "ours right"] += own == pair["right"]
        counts[group, "theirs right"] += foreign == pair["right"]
        undecided = any(reading.get("undecided") for reading in our.get("readings", []))
        counts[group, "undecided"] += undecided
        if own != foreign:
            who = "ours" if own == pair["right"] else "Math-Verify"
            listed.append({"rule": rule, "right": who, "pair": pair, "ours": our, "theirs": their})
    for group in ("GSM8K", "by hand"):
        left = counts[group, "left out"]
        n = counts[group, "pairs"] - left
        print(
            f"{rule}, {group}: {n} pairs, {counts[group, 'agree']} agree; right: ours {counts[group, 'ours right']} "
            f"({counts[group, 'undecided']} undecided), Math-Verify {counts[group, 'theirs right']}"
        )
        if left:
            print(f"{rule}, {group}: {left} more whose ground truth TRL leaves out; right of these: ours {counts[group, 'left out, ours right']}")
    return listed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("--out", type=Path, help="file for the disagreements, one JSON object a line")
    parser.add_argument("--grade", help="the example program `grade`, built; cargo builds it where absent")
    parser.add_argument("--python", help="a Python that has Math-Verify")
    args = parser.parse_args()
    if not args.grade:
        subprocess.run(["cargo", "build", "--release", "--no-default-features", "--example", "grade"], cwd=ROOT, check=True)
        built = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, capture_output=True, check=True)
        args.grade = str(Path(json.loads(built.stdout)["target_directory"]) / "release" / "examples" / "grade")
    pairs = list(gsm8k_pairs(args.gsm8k, 2_000, random.Random(0)))
    pairs += [json.loads(line) for line in (ROOT / "tests/fixtures/rewards/math_pairs.jsonl").open()]
    with tempfile.TemporaryDirectory() as folder:
        other = theirs(args.python or install(folder), pairs)
    listed = []
    for rule in ("math", "trl_accuracy"):
        listed += compare(rule, pairs, ours(args.grade, rule, pairs), other)
    for entry in listed:
        pair = entry["pair"]
        print(f"{entry['rule']}: {entry['right']} is right: {pair['gold']!r} | {pair['completion']!r} | {pair['right']}")
    if args.out:
        args.out.write_text("".join(json.dumps(entry) + "\n" for entry in listed))


main()
