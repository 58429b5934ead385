"""The calculator: examples/calculator.yaml from three seeds, with its tool and without, and what validation says at the end.

Holds where each run ends within 15 minutes, solves at least 90 % of the held-out problems with the tool and at most 20 % without, and
where in every step all tokens that were trained on are what the template writes of the conversation.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
REWARD = "val-core/calculator/reward"
MOST_SECONDS = 15 * 60
LEAST_WITH, MOST_WITHOUT = 0.9, 0.2


def run(firebrick, output, seed, tool, more):
    """Seconds of a run, and the lines of its metrics."""
    began = time.monotonic()
    settings = [f"trainer.seed={seed}", f"task.tool={str(tool).lower()}", f"output={output}", *more]
    subprocess.run([firebrick, "train", str(ROOT / "examples/calculator.yaml"), *settings, "--quiet"], check=True)
    seconds = time.monotonic() - began
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return seconds, [json.loads(line) for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=pathlib.Path, help="a folder in which the runs are left")
    parser.add_argument("settings", nargs="*", help="more settings of the runs, such as trainer.steps=50")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = options.runs or pathlib.Path(name)
        print(f"{os.cpu_count()} cores\n\n| seed | tool | validation, from the warm-up on | at the end | seconds | holds |\n|---|---|---|---|---|---|")
        for seed in options.seeds:
            for tool in (True, False):
                output = folder / f"{'tool' if tool else 'head'}-{seed}"
                seconds, lines = run(options.firebrick, output, seed, tool, options.settings)
                rewards = [line[REWARD] for line in lines if REWARD in line]
                steps = lines[1:]
                holds = seconds < MOST_SECONDS
                holds &= rewards[-1] >= LEAST_WITH if tool else rewards[-1] <= MOST_WITHOUT
                if tool:
                    holds &= all(step["environment/template_mismatch"] == 0 and step["environment/lost"] == 0 for step in steps)
                failed |= not holds
                curve = " ".join(f"{reward:.2f}" for reward in rewards)
                print(f"| {seed} | {'yes' if tool else 'no'} | {curve} | {rewards[-1]:.3f} | {seconds:.0f} | {'yes' if holds else 'NO'} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
