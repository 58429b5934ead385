"""Long runs: memory, file handles and threads stay, and a step costs at the end what it cost at the beginning.

    tests/campaigns/run soak [--firebrick PROGRAM] [--steps 5000] [--device cpu] [--only PLAN ...] [--json FILE] [--sample]

Cargo builds PROGRAM where it is absent. Three plans have every memory technique of one rank between them; a run of each validates and saves
ten times. Compared are the first and the last tenth of its steps: the medians of resident memory (2 % and 2 MiB apart at most), the fewest
file handles and threads (no more at the end), and CPU seconds a step (10 % apart at most). On a GPU memory is compared from the sixth tenth
on: drivers add to their pools a few times in the first half of 500 steps, and a leak does so in both. `--sample` is the test suite's: 60 steps, of
which only handles and threads are compared. `--json` writes the figures as a file of `benches/results`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = 10
MOST_MEMORY, MOST_BYTES, MOST_SECONDS = 1.02, 2 << 20, 1.10
CONFIG = """
model:
  arch: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 4,
         max_position_embeddings: 32}
task: {kind: arithmetic, difficulty: 1, partial: true, validation_size: 8}
output: run
rollout: {n: 4, prompt_length: 6, response_length: 6}
optim: {lr: 1.0e-4}
trainer: {train_batch_size: 4, seed: 5, max_ckpt_to_keep: 2}
memory: {train_tokens: 48, score_tokens: 48, head_rows: 16, attention_rows: 8, gradient_checkpointing: true}
"""
PLANS = {
    "streamed": [
        "objective.kl_loss_coef=0.01", "memory.recompute_granularity=half", "memory.activation_offload=true",
        "memory.activation_offload_group=2", "memory.prefetch=3", "memory.param_offload=streamed", "memory.order=segment_major",
        "memory.grad_offload=true", "memory.optimizer_offload=cpu", "memory.offload_fraction=0.5", "memory.moments=block8",
    ],
    "updated in the backward pass": [
        "optim.clip_grad=null", "memory.checkpoint_every=2", "memory.activation_offload=true", "memory.prefetch=0", "memory.packing=padded",
        "memory.optimizer_offload=cpu", "memory.step_in_backward=true", "memory.moments=bf16", "memory.cleanup_every=1",
    ],
    "away while idle": [
        "objective=ppo", "memory.checkpoint_ratio=0.5", "memory.param_offload=idle", "memory.optimizer_offload=idle",
        "memory.grad_offload=true", "memory.micro_batch_size=2", "memory.cleanup_every=10",
    ],
}


def built():
    command = ["cargo", "build", "--release", "--bin", "firebrick"]
    subprocess.run(command, cwd=ROOT, check=True)
    about = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, capture_output=True, check=True)
    return str(Path(json.loads(about.stdout)["target_directory"]) / "release/firebrick")


def reading(pid):
    """Resident bytes, file handles, threads and CPU seconds of a process."""
    process = Path(f"/proc/{pid}")
    fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(list((process / "fd").iterdir())), int(fields[17]), seconds


def steps_of(lines, file):
    """Finished steps, as the growing file of metrics has them."""
    lines += file.read().count(b"\n")
    return lines


def soak(firebrick, folder, settings, options):
    """Readings of a run, each with the steps before it."""
    (folder / "config.yaml").write_text(CONFIG)
    every = max(1, options.steps // PARTS)
    more = [f"trainer.steps={options.steps}", f"trainer.save_freq={every}", f"trainer.test_freq={every}", f"device={options.device}"]
    with (folder / "said.txt").open("wb") as said:
        command = [firebrick, "train", "config.yaml", "--quiet", "trainer.val_before_train=false", *settings, *more]
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    # a line before the first step
    readings, metrics, lines = [], folder / "run/metrics.jsonl", -1
    while process.poll() is None and not metrics.exists():
        time.sleep(0.01)
    with open(metrics if metrics.exists() else os.devnull, "rb") as file:
        while process.poll() is None:
            before, lines = lines, steps_of(lines, file)
            if lines > before and lines > 0:
                try:
                    readings.append((lines, *reading(process.pid)))
                except OSError:
                    break
            time.sleep(0.002)
    if process.wait() != 0:
        sys.exit((folder / "said.txt").read_text())
    return readings


def tenths(readings, steps):
    """Of each tenth of the steps, or fewer parts if these would have less than two: median of resident memory, fewest handles and threads,
    CPU seconds a step."""
    part = max(2, steps // PARTS)
    found = []
    for begin in range(0, steps - part + 1, part):
        end = begin + part
        own = [reading for reading in readings if begin < reading[0] <= end]
        if len(own) < 2:
            sys.exit(f"too few readings of the steps {begin} to {end}; --steps has to be larger")
        seconds = (own[-1][4] - own[0][4]) / (own[-1][0] - own[0][0])
        # a leak raises the fewest; a reading during a checkpoint has more
        found.append((statistics.median(r[1] for r in own), min(r[2] for r in own), min(r[3] for r in own), seconds))
    return found


def problems(parts, whole, device):
    (first, last), found = (parts[0], parts[-1]), []
    before = (first if device == "cpu" else parts[len(parts) // 2])[0]
    if last[1] > first[1]:
        found.append(f"file handles rose from {first[1]} to {last[1]}")
    if last[2] > first[2]:
        found.append(f"threads rose from {first[2]} to {last[2]}")
    if whole and last[0] > max(MOST_MEMORY * before, before + MOST_BYTES):
        found.append(f"resident memory rose from {before / 2**20:.1f} to {last[0] / 2**20:.1f} MiB")
    if whole and last[3] > MOST_SECONDS * first[3]:
        found.append(f"a step took {first[3] * 1e3:.2f} and then {last[3] * 1e3:.2f} ms of CPU")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--firebrick", help="the program; cargo builds it where absent")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sample", action="store_true", help="60 steps, of which handles and threads are compared")
    options = parser.parse_args()
    if options.sample:
        options.steps = 60
    firebrick, rows, wrong = os.path.abspath(options.firebrick or built()), [], 0
    for plan in options.only:
        with tempfile.TemporaryDirectory() as folder:
            parts = tenths(soak(firebrick, Path(folder), PLANS[plan], options), options.steps)
        first, last = parts[0], parts[-1]
        found = problems(parts, not options.sample, options.device)
        wrong += bool(found)
        numbers = [round(part[0] / 2**20, 1) for part in (first, last)] + [first[1], last[1], first[2], last[2]]
        rows.append([f"{plan}, {options.steps} steps, {options.device}", *numbers, round(first[3] * 1e3, 2), round(last[3] * 1e3, 2)])
        print(f"{'FAILED' if found else 'ok':8}{plan}: {rows[-1][1:]} {'; '.join(found)}", flush=True)
        print(f"        resident, MiB, by tenths: {[round(part[0] / 2**20, 1) for part in parts]}", flush=True)
    if options.json:
        git = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        pairs = ["resident, MiB", "file handles", "threads", "CPU a step, ms"]
        result = {
            "bench": "soak", "title": "Long runs", "date": time.strftime("%Y-%m-%d"), "machine": "",
            "commit": git.stdout.strip(), "command": f"tests/campaigns/run soak --steps {options.steps} --device {options.device}",
            "what": "The first and the last tenth of a run's steps, under three plans that have every memory technique of one rank between them.",
            "columns": ["plan", *(f"{name}, {part}" for name in pairs for part in ("first", "last"))], "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{len(options.only) - wrong} passed, {wrong} failed")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
