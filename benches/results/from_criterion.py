#!/usr/bin/env python3
"""Files of this folder from what criterion measured: cases side by side, with their ratio.

    cargo bench --no-default-features --bench packing
    benches/results/from_criterion.py packing|kv_cache_int8|linear_attention [--criterion target/criterion] [--results FOLDER]

`linear_attention` is compared with transformers: `--peer FILE` has the lines that `benches/side_by_side/delta_net.py` printed.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE.parent / "support"))
import results

ATTENTION = ["8 completions a prompt", "8 completions a prompt, 14 heads", "sequences of their own", "1024 tokens", "1024 tokens, 14 heads"]


@dataclass
class Case:
    group: str
    function: str
    value: str
    seconds: float


def cases(folder: Path) -> list[Case]:
    """Medians of the newest run of each case."""
    found = []
    for estimates in folder.rglob("new/estimates.json"):
        case = json.loads((estimates.parent / "benchmark.json").read_text(encoding="utf-8"))
        nanoseconds = json.loads(estimates.read_text(encoding="utf-8"))["median"]["point_estimate"]
        found.append(Case(case["group_id"], case["function_id"] or "", case["value_str"] or "", nanoseconds / 1e9))
    return found


def ratio(slow: float | None, fast: float | None) -> float | None:
    return results.significant(slow / fast) if slow and fast else None


def packing(found: list[Case], _) -> tuple[dict, list[list]]:
    groups: dict[str, dict[str, float]] = {}
    for case in found:
        if case.group.startswith("packing/"):
            groups.setdefault(case.group.removeprefix("packing/"), {})[case.function] = case.seconds
    rows = []
    for name, seconds in sorted(groups.items()):
        padded, packed = seconds.get("padded"), seconds.get("packed")
        rows.append([name, *(results.significant(side and 1e3 * side) for side in (padded, packed)), ratio(padded, packed)])
    return {
        "title": "Packed and padded rows",
        "command": "cargo bench --no-default-features --bench packing",
        "what": "Gradients of the arithmetic example's model and of a decoder of hidden size 256, over sequences of the lengths and micro-batches of "
        "the tokens that a case names; medians.",
        "columns": ["case", "padded, ms", "packed, ms", "speed-up"],
    }, rows


def kv_cache_int8(found: list[Case], _) -> tuple[dict, list[list]]:
    seconds = {case.function: case.seconds for case in found if case.group == "paged_attention"}
    rows = []
    for name in ATTENTION:
        wide, int8 = seconds.get(name), seconds.get(f"{name} in 8 bits")
        shown = "64 to 320 tokens" if name == "sequences of their own" else name
        if wide or int8:
            rows.append([shown, *(results.significant(side and 1e6 * side) for side in (wide, int8)), ratio(wide, int8)])
    return {
        "title": "Keys and values in 8 bits",
        "command": "cargo bench --workspace --no-default-features --bench kernels -- paged_attention",
        "what": "Paged attention of a layer on a CPU, medians.",
        "columns": ["case", "f32, µs", "int8, µs", "speed-up"],
    }, rows


def linear_attention(found: list[Case], peer: Path | None) -> tuple[dict, list[list]]:
    ours = {(case.group, case.value): case.seconds for case in found if case.function == "gated_delta_net"}
    lines = [json.loads(line) for line in peer.read_text(encoding="utf-8").splitlines()] if peer else []
    # a case of decoding is its sequences here and its tokens there
    theirs = {(line["case"], "16" if line["case"] == "decoding" else str(line["tokens"])): line["median"] for line in lines}
    shown = {"decoding": "sampling, 16 × 64 tokens, 4 layers"}
    rows = []
    for (group, value), seconds in sorted(ours.items(), reverse=True):
        other = theirs.get((group, value))
        name = shown.get(group, f"{group}, {int(value):,} tokens")
        rows.append([name, results.significant(seconds), results.significant(other), ratio(other, seconds)])
    return {
        "title": "Gated DeltaNet on a CPU",
        "command": "cargo bench --workspace --bench linear_attention",
        "what": "The shapes of Qwen3.5-0.8B, f32, two threads, medians; the rule is convolution, delta rule and norm; mixer and rule are forward and backward.",
        "columns": ["case", "Firebrick, s", "transformers, s", "speed-up"],
        "peer": f"transformers {lines[0]['transformers']}, PyTorch {lines[0]['torch'].split('+')[0]}" if lines else "",
    }, rows


BENCHES = {"packing": packing, "kv_cache_int8": kv_cache_int8, "linear_attention": linear_attention}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--criterion", type=Path, default=HERE.parents[1] / "target/criterion", help="criterion's folder (default: target/criterion)")
    parser.add_argument("--peer", type=Path, help="lines of delta_net.py")
    results.add_argument(parser)
    args = parser.parse_args()
    head, rows = BENCHES[args.bench](cases(args.criterion), args.peer)
    if not rows:
        sys.exit(f"{args.criterion} has no cases of {args.bench}; run {head['command']}")
    results.write(args.results or HERE, args.bench, rows=rows, **head)


if __name__ == "__main__":
    main()
