"""Run both sides in turn and print the ratios; see `run` beside this file."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CONFIG = """\
model: {path: FOLDER/model}
task:
  kind: jsonl
  train: FOLDER/prompts.jsonl
  prompt: "{prompt}"
  answer_field: answer
  rewards: [{kind: regex, pattern: "7.?$"}]
output: FOLDER/run
device: cpu
objective: {name: grpo, adv_eps: 1.0e-4}
rollout: {n: 8, prompt_length: 64, response_length: 64, max_num_seqs: 64}
memory: {train_tokens: 2048}
update: {old_log_probs: sampler}
optim: {lr: 1.0e-6, weight_decay: 0.0}
trainer: {steps: STEPS, train_batch_size: 8}
"""
# What the comparison is about, and the names of Firebrick's metrics for it.
PARTS = {"sampling": "timing_s/gen", "update": "timing_s/update_actor", "step": "perf/time_per_step"}


def measured(command: list[str], env: dict[str, str] | None = None) -> int:
    """Run a command; bytes of its largest resident set."""
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=sys.stderr, stderr=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with exit status {process.returncode}")
    return usage.ru_maxrss * 1024


def program() -> str:
    """The built program."""
    if given := os.environ.get("FIREBRICK"):
        return given
    build = ["cargo", "build", "--release", "--no-default-features", "--message-format=json-render-diagnostics"]
    lines = subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    found = [json.loads(line).get("executable") for line in lines]
    return next(path for path in found if path)


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds of each part; the first step warms up and does not count."""
    return {part: statistics.median(step[part] for step in steps[1:]) for part in PARTS}


def ours(firebrick: str, folder: Path, steps: int) -> tuple[dict[str, float], int]:
    config = folder / "run.yaml"
    config.write_text(CONFIG.replace("FOLDER", str(folder)).replace("STEPS", str(steps)), encoding="utf-8")
    memory = measured([firebrick, "train", str(config)])
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if "timing_s/update_actor" in row]
    return medians([{part: row[name] for part, name in PARTS.items()} for row in rows]), memory


def theirs(folder: Path, steps: int) -> tuple[dict[str, float], int]:
    output = folder / "peer.json"
    env = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    memory = measured(
        [sys.executable, str(HERE / "peer.py"), str(folder), "--steps", str(steps), "--output", str(output)], env
    )
    return medians(json.loads(output.read_text(encoding="utf-8"))), memory


def compare(firebrick: str, size: str, folder: Path, steps: int) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(HERE / "prepare.py"), str(folder), "--size", size], check=True)
    mine, my_memory = ours(firebrick, folder, steps)
    peer, peer_memory = theirs(folder, steps)
    ratios = {part: peer[part] / mine[part] for part in PARTS}
    ratios["peak_memory"] = my_memory / peer_memory
    print(f"{size}: {'':14} {'Firebrick':>12} {'TRL':>12} {'ratio':>8}")
    for part in PARTS:
        print(f"  {part:18} {mine[part]:>10.3f} s {peer[part]:>10.3f} s {ratios[part]:>8.2f}")
    mib = 2**20
    print(
        f"  {'peak_memory':18} {my_memory / mib:>8.0f} MiB {peer_memory / mib:>8.0f} MiB {ratios['peak_memory']:>8.2f}",
        flush=True,
    )
    return {
        "ratios": ratios,
        "seconds": {"firebrick": mine, "trl": peer},
        "peak_bytes": {"firebrick": my_memory, "trl": peer_memory},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Firebrick beside TRL on one machine. Time ratios are TRL over Firebrick (more is better), memory is "
        "Firebrick's largest resident set over TRL's (less is better)."
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--steps", type=int, default=6, help="steps each; the first does not count (default: 6)")
    parser.add_argument("--size", choices=["base", "wide", "both"], default="both")
    parser.add_argument("--keep", type=Path, help="keep checkpoints and runs in this folder")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps should be at least 2: the first warms up")
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep} should be a new or empty folder")

    firebrick = program()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        result: dict = {}
        if args.size in ("base", "both"):
            result = compare(firebrick, "base", folder / "base", args.steps)
        if args.size in ("wide", "both"):
            result["wide"] = compare(firebrick, "wide", folder / "wide", args.steps)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
