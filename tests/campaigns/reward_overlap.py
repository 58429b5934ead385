"""A Python reward whose judging alone takes as long as sampling alone: how long both take together.

A small model from random weights samples completions of many lengths. First their reward is a rule, which takes no time: that is
sampling alone. Then it is a Python function that waits, as one that asks a server does, for so long that its workers alone take as long
for the groups of a step: the example program `judge` measures that. At last a run has both. Holds where the step's sampling and judging
together take at most 1.2 times the longer of the two.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# eight times as many completions as are sampled at a time: verl's examples have five to sixteen times as many
GROUPS, GROUP, WORKERS, STEPS = 128, 4, 2, 5
MOST = 1.2
FUNCTION = '''import time


def waits(completions, seconds, **kwargs):
    time.sleep(seconds)
    return [len(completion) / 1000 for completion in completions]
'''
CONFIG = """
model:
  arch: {{model_type: llama, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4, num_attention_heads: 4,
         max_position_embeddings: 1024}}
  tokenizer: {tokenizer}
task: {{kind: dataset, train: {rows}, rewards: [{reward}]}}
output: {output}
device: cpu
rollout: {{n: {group}, prompt_length: 32, response_length: 512, max_num_seqs: 64}}
trainer: {{steps: {steps}, train_batch_size: {groups}, save_freq: -1}}
"""


def run(firebrick, folder, name, reward):
    """Median seconds from the beginning of a step's sampling to the last verdict, and the share of it that was waited for verdicts."""
    config, output = folder / f"{name}.yaml", folder / name
    tokenizer = ROOT / "tests/fixtures/models/llama-rope-llama3"
    config.write_text(CONFIG.format(
        tokenizer=tokenizer, rows=folder / "rows.jsonl", reward=json.dumps(reward), output=output, group=GROUP, groups=GROUPS, steps=STEPS,
    ))
    subprocess.run([firebrick, "train", str(config), "--quiet"], check=True)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "timing_s/gen" in line]
    assert len(steps) == STEPS, f"{len(steps)} steps"
    lengths = steps[-1]["response_length/min"], steps[-1]["response_length/mean"], steps[-1]["response_length/max"]
    waited = statistics.median(step.get("timing_s/reward_wait", 0.0) for step in steps)
    return statistics.median(step["timing_s/gen"] + step["timing_s/reward"] for step in steps), waited, lengths


def alone(judge, folder, reward):
    """Seconds that the workers take for the groups of a step and nothing else."""
    rows = folder / "judged.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for index in range(GROUPS):
            for _ in range(GROUP):
                file.write(json.dumps({"prompt": f"row {index}", "completion": "some words"}) + "\n")
    task = {"kind": "dataset", "train": str(rows), "rewards": [reward]}
    done = subprocess.run([judge, json.dumps(task)], capture_output=True, text=True, check=True)
    return float(re.search(r"judged in ([0-9.]+) s", done.stderr)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"))
    parser.add_argument("--judge", default=str(ROOT / "target/release/examples/judge"), help="the example program `judge`, built")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = "".join(json.dumps({"prompt": f"Question {index}:"}) + "\n" for index in range(4 * GROUPS))
        (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
        (folder / "waits.py").write_text(FUNCTION, encoding="utf-8")
        rule = {"kind": "length", "max": 100}
        sampling, _, lengths = run(options.firebrick, folder, "sampling", rule)
        seconds = sampling * WORKERS / GROUPS
        reward = {
            "kind": "python", "file": str(folder / "waits.py"), "function": "waits", "kwargs": {"seconds": seconds}, "workers": WORKERS,
            "python": sys.executable,
        }
        judging = alone(options.judge, folder, reward)
        both, waited, _ = run(options.firebrick, folder, "both", reward)
        # the machine may have become slower or faster meanwhile
        again, _, _ = run(options.firebrick, folder, "again", rule)
    longer = max(statistics.mean([sampling, again]), judging)
    ratio = both / longer
    print(f"{GROUPS} groups of {GROUP}, of {lengths[0]:.0f} to {lengths[2]:.0f} tokens (mean {lengths[1]:.0f}); {WORKERS} workers")
    print(f"sampling alone {sampling:.2f} s, {again:.2f} s afterwards; judging alone {judging:.2f} s; both {both:.2f} s, {waited:.2f} s of it waited")
    print(f"{'ok' if ratio <= MOST else 'FAILED':8}both together take {ratio:.2f} of the longer one, {both / (longer + min(sampling, judging)):.2f} of the sum")
    sys.exit(ratio > MOST)


if __name__ == "__main__":
    main()
