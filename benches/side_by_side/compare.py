"""Run both sides in turn and print the ratios; see `run` beside this file."""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from sizes import SIZES, Size

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "benches/support"))
import results

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
rollout: {n: COMPLETIONS, prompt_length: PROMPT_TOKENS, response_length: NEW_TOKENS, max_num_seqs: 64}
memory: {train_tokens: 2048}
update: {old_log_probs: sampler}
optim: {lr: 1.0e-6, weight_decay: 0.0}
trainer: {steps: STEPS, train_batch_size: PROMPTS, save_freq: -1}
"""
# What the comparison is about, and the names of Firebrick's metrics for it.
PARTS = {"sampling": "timing_s/gen", "update": "timing_s/update_actor", "step": "perf/time_per_step"}
PEERS = {"static": "TRL, static", "continuous": "TRL, continuous"}
ROWS = ["sampling, s", "update, s", "step, s", "sampling, tokens/s", "step, tokens/s", "peak memory, MiB"]
MIB = 2**20


class Failed(Exception):
    """A command that did not end well, and its last words."""


def measured(command: list[str], log: Path, timeout: float, env: dict[str, str] | None = None) -> int:
    """Run a command whose output goes to a file; bytes of its largest resident set."""
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
    late = not timer.is_alive()
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        raise Failed(f"not done after {timeout:.0f} s" if late else f"exit status {process.returncode}: {last}")
    return usage.ru_maxrss * 1024


def program() -> str:
    """The built program."""
    if given := os.environ.get("FIREBRICK"):
        return given
    build = ["cargo", "build", "--release", "--no-default-features", "--message-format=json-render-diagnostics"]
    lines = subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    found = [json.loads(line).get("executable") for line in lines]
    return next(path for path in found if path)


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary(steps: list[dict], peak_bytes: int) -> dict:
    """Medians of the steps, each with the seconds of its parts and the lengths of its completions. The first step warms
    up and does not count, but for lengths."""
    counted = [step | {"tokens": sum(step["lengths"])} for step in steps[1:]]
    lengths = [length for step in steps for length in step["lengths"]]
    median = lambda value: statistics.median(map(value, counted))
    return {
        "seconds": {part: median(lambda step: step[part]) for part in PARTS},
        "tokens_per_second": {part: median(lambda step: step["tokens"] / step[part]) for part in PARTS},
        "tokens": median(lambda step: step["tokens"]),
        "mean_length": statistics.mean(lengths),
        "longest": max(lengths),
        "peak_bytes": peak_bytes,
    }


def accounts(run: Path) -> list[dict]:
    """Of sampling and of the update: the largest peak of the counted heap, and who held how much, at most, in that
    phase. The rest is nobody's in particular: temporaries, the program."""
    peaks = []
    rows = json_lines(run / "memory.jsonl")
    for phase in ("gen", "update_actor"):
        peak = max((row for row in rows if row["phase"] == phase), key=lambda row: row["peak_bytes"])
        held: dict[str, int] = {}
        for account in peak["accounts"]:
            held[account["category"]] = held.get(account["category"], 0) + account["peak_bytes"]
        # each account's own peak: together they may exceed the phase's, whose moments they do not share
        if (rest := peak["peak_bytes"] - sum(held.values())) > 0:
            held["the rest"] = rest
        peaks.append({"phase": phase, "step": peak["step"], "peak_bytes": peak["peak_bytes"], "held": held})
    return peaks


def ours(firebrick: str, size: Size, folder: Path, steps: int, timeout: float) -> dict:
    values = {
        "FOLDER": folder,
        "STEPS": steps,
        "COMPLETIONS": size.completions,
        "PROMPTS": size.prompts,
        "PROMPT_TOKENS": size.prompt_tokens[1],
        "NEW_TOKENS": size.new_tokens,
    }
    text = CONFIG
    for name, value in values.items():
        text = text.replace(name, str(value))
    config = folder / "run.yaml"
    config.write_text(text, encoding="utf-8")
    memory = measured([firebrick, "train", str(config)], folder / "firebrick.log", timeout)
    run = folder / "run"
    lengths: dict[int, list[int]] = {}
    for sample in json_lines(run / "samples.jsonl"):
        lengths.setdefault(sample["step"], []).append(sample["tokens"])
    rows = [row for row in json_lines(run / "metrics.jsonl") if PARTS["update"] in row]
    seconds = [{part: row[name] for part, name in PARTS.items()} for row in rows]
    timed = [part | {"lengths": lengths[row["training/global_step"]]} for part, row in zip(seconds, rows)]
    heap = json.loads((run / "summary.json").read_text(encoding="utf-8"))["measured_peak_bytes"]
    return summary(timed, memory) | {"heap_bytes": heap, "accounts": accounts(run)}


def theirs(size: str, sampling: str, folder: Path, steps: int, timeout: float) -> dict:
    output = folder / f"{sampling}.json"
    env = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, str(HERE / "peer.py"), str(folder), "--size", size, "--sampling", sampling]
    command += ["--steps", str(steps), "--output", str(output)]
    memory = measured(command, folder / f"{sampling}.log", timeout, env)
    return summary(json.loads(output.read_text(encoding="utf-8")), memory)


def cells(side: dict) -> dict[str, float]:
    """A side's column of the table."""
    seconds = {f"{part}, s": side["seconds"][part] for part in PARTS}
    rates = {f"{part}, tokens/s": side["tokens_per_second"][part] for part in ("sampling", "step")}
    return seconds | rates | {"peak memory, MiB": side["peak_bytes"] / MIB}


def ratios(mine: dict, peer: dict) -> dict[str, float]:
    """TRL's seconds over Firebrick's and Firebrick's tokens/s over TRL's, so that more is better; Firebrick's memory
    over TRL's, so that less is."""
    mine, peer = cells(mine), cells(peer)
    return {row: peer[row] / mine[row] if row.endswith(", s") else mine[row] / peer[row] for row in ROWS}


def table(name: str, mine: dict, peers: dict[str, dict]) -> str:
    head = f"{name}:".ljust(22) + f"{'Firebrick':>12}"
    head += "".join(f"{PEERS[peer]:>18}{'ratio':>8}" for peer in peers)
    lines = [head]
    for row in ROWS:
        line = f"  {row:20}" + number(cells(mine)[row]).rjust(12)
        for peer in peers.values():
            line += number(cells(peer)[row]).rjust(18) + f"{ratios(mine, peer)[row]:>8.2f}"
        lines.append(line)
    for row, key in [("new tokens a step", "tokens"), ("mean length", "mean_length"), ("longest", "longest")]:
        line = f"  {row:20}" + number(mine[key]).rjust(12)
        lines.append(line + "".join(number(peer[key]).rjust(18) + " " * 8 for peer in peers.values()))
    lines = [line.rstrip() for line in lines]
    lines.append(f"  expected mean length  {SIZES[name].mean_new_tokens:.1f}")
    lines.append(f"  Firebrick's heap, at most {number(mine['heap_bytes'] / MIB)} MiB")
    for peak in mine["accounts"]:
        held = ", ".join(f"{what} {number(size / MIB)}" for what, size in peak["held"].items())
        lines.append(f"    {peak['phase']} (step {peak['step']}): {number(peak['peak_bytes'] / MIB)}, of it {held}")
    return "\n".join(lines)


def number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def compare(firebrick: str, name: str, folder: Path, args: argparse.Namespace) -> dict:
    size, steps = SIZES[name], args.steps or SIZES[name].steps
    folder.mkdir(parents=True, exist_ok=True)
    prepare = [sys.executable, str(HERE / "prepare.py"), str(folder), "--size", name]
    peers, failures = {}, {}
    try:
        measured(prepare, folder / "prepare.log", args.timeout)
        mine = ours(firebrick, size, folder, steps, args.timeout)
    except Failed as failed:
        sys.exit(f"{name}: {failed}")
    for peer in args.peer:
        try:
            peers[peer] = theirs(name, peer, folder, steps, args.timeout)
        except Failed as failed:
            failures[peer] = str(failed)
    print(table(name, mine, peers))
    for peer, why in failures.items():
        print(f"  {PEERS[peer]}: {why}")
    sys.stdout.flush()
    return {
        "ratios": {peer: ratios(mine, side) for peer, side in peers.items()},
        "firebrick": mine,
        "trl": peers,
        "failures": failures,
    }


def figures(name: str, mine: dict, peers: dict[str, dict]) -> list:
    """A size's row of `COLUMNS`; nothing of a peer that did not run."""
    parts = ["sampling, s", "update, s", "step, s", "sampling, tokens/s", "peak memory, MiB"]
    columns = lambda side: [results.significant(cells(side)[part]) for part in parts] if side else [None] * len(parts)
    row = [f"`{name}`", *columns(mine)]
    for peer in PEERS:
        row += columns(peers.get(peer))
    static = ratios(mine, peers["static"]) if "static" in peers else {}
    return row + [results.significant(static.get(part)) for part in ("step, s", "peak memory, MiB")]


COLUMNS = ["size", "sampling, s", "update, s", "step, s", "sampling, tokens/s", "peak, MiB"]
COLUMNS += [f"TRL {peer} {part}" for peer in PEERS for part in ("sampling, s", "update, s", "step, s", "tokens/s", "peak, MiB")]
COLUMNS += ["speed-up", "memory / TRL"]


def write_figures(folder: Path | None, rows: list[list]) -> None:
    versions = f"TRL {importlib.metadata.version('trl')}, PyTorch {importlib.metadata.version('torch')}" if folder else ""
    results.write(
        folder,
        "grpo_step",
        "A GRPO step on a CPU",
        "benches/side_by_side/run --size base ragged long real",
        "Medians in f32; ratios are to TRL's static batches. `base`: hidden size 256, 6 layers, 8 prompts × 8 completions of 64 + 64 tokens; "
        "`ragged`: at most 256 new tokens, mean 63; `long`: 2 × 8 of at most 1,024; `real`: a 0.5B model's shape, 2 × 2 of 32 + 16.",
        COLUMNS,
        rows,
        peer=versions,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Firebrick beside TRL on one machine. Ratios of time are TRL's seconds over Firebrick's, and Firebrick's "
        "tokens a second over TRL's (more is better); memory is Firebrick's largest resident set over TRL's (less is better)."
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--steps", type=int, help="steps each; the first does not count (default: 6, real 4)")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["base", "wide"], help="(default: base wide)")
    parser.add_argument(
        "--peer",
        nargs="*",
        choices=PEERS,
        default=list(PEERS),
        help="how TRL samples (default: both ways, one after the other; none: Firebrick alone)",
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that a side may take (default: 3600)")
    results.add_argument(parser)
    parser.add_argument("--keep", type=Path, help="keep checkpoints, logs and runs in this folder")
    args = parser.parse_args()
    if args.steps is not None and args.steps < 2:
        parser.error("--steps should be at least 2: the first warms up")
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep} should be a new or empty folder")

    firebrick = program()
    result = {}
    for name in args.size:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (args.keep or Path(temporary)).resolve() / name
            result[name] = compare(firebrick, name, folder, args)
        if args.json:
            args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    write_figures(args.results, [figures(name, size["firebrick"], size["trl"]) for name, size in result.items()])


if __name__ == "__main__":
    main()
