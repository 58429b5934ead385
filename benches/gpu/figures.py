"""Files of `benches/results` from the report of `run`: a step of the 0.5B model, rates, copies and launches.

The archive has no git: FIREBRICK_COMMIT names the commit there.
"""

from pathlib import Path

import results

GIB = 2**30
# Names of the groups of matmuls by rows and pass; gradients are measured with the most rows.
PASSES = {"forward": "forward", "inputs": "gradients of inputs", "weights": "gradients of weights"}


def write(folder: Path, report: dict) -> None:
    stages = {stage["stage"]: stage["figures"] for stage in report["stages"]}
    machine = results.slug(report["device"]["name"])
    torch = f"PyTorch {report['peer'].get('torch', '').split('+')[0]}" if report["peer"] else ""
    if step := stages.get("step 0.5B"):
        both = f"{torch}, transformers {report['peer'].get('transformers')}" if torch else ""
        write_step(folder, machine, both, step)
    if cases := [case for stage in ("rates", "attention", "decode") for case in stages.get(stage, {}).get("cases", [])]:
        write_rates(folder, machine, torch, cases)


def write_step(folder: Path, machine: str, peer: str, step: dict) -> None:
    sizes, sides = step["sizes"], (step["firebrick"], step["torch"])
    sequences = sizes["prompts"] * sizes["n"]
    tokens = {"sampling": sequences * sizes["new_tokens"], "update": sequences * (sizes["new_tokens"] + sizes["prompt_tokens"])}
    rows = []
    for part, count in tokens.items():
        ours, theirs = (count / side[part] if side.get(part) else None for side in sides)
        rows.append(row(f"{part}, tokens/s", ours, theirs, over(ours, theirs)))
    whole = [sum(side[part] for part in tokens) if all(side.get(part) for part in tokens) else None for side in sides]
    rows.append(row("step, s", *whole, over(whole[1], whole[0])))
    for what, key in (("peak by the driver", "peak_driver_bytes"), ("peak resident set", "peak_resident_bytes")):
        ours, theirs = (side[key] / GIB if side.get(key) else None for side in sides)
        rows.append(row(f"{what}, GiB", ours, theirs, over(ours, theirs)))
    results.write(
        folder,
        "grpo_step_on_gpu",
        "A GRPO step on a GPU",
        "benches/gpu/run --only step",
        "A 0.5B model's shape in bf16, 64 prompts × 8 completions of 128 + 512 tokens, layers recomputed where memory is short, after a warm-up step; "
        "ratios are speed-ups, and memory over the peer's.",
        ["figure", "Firebrick", "peer", "ratio"],
        rows,
        peer,
        machine,
    )


def write_rates(folder: Path, machine: str, peer: str, cases: list[dict]) -> None:
    """The least and the most of all cases of a kind, in bf16."""
    groups: dict[str, list[dict]] = {}
    for case in cases:
        if case.get("dtype") == "bf16" and case.get("tflops") and (name := group(case)):
            groups.setdefault(name, []).append(case)
    rows = []
    for name, found in groups.items():
        ours = [case["tflops"] for case in found]
        theirs = [case["torch"]["tflops"] for case in found if case["torch"].get("tflops")]
        ratios = [case["torch"]["seconds"] / case["seconds"] for case in found if case["torch"].get("seconds")]
        rows.append([name, *ends(ours), *ends(theirs), *ends(ratios)])
    if rows:
        results.write(
            folder,
            "rates",
            "Rates of a GPU",
            "benches/gpu/run --only rates,attention,decode",
            "TFLOP/s in bf16 at shapes of 0.5B and 1.5B models; ratios are PyTorch's time over Firebrick's.",
            ["case", "Firebrick, least", "Firebrick, most", "PyTorch, least", "PyTorch, most", "ratio, least", "ratio, most"],
            rows,
            peer,
            machine,
        )
    write_copies(folder, machine, peer, cases)


def write_copies(folder: Path, machine: str, peer: str, cases: list[dict]) -> None:
    names = {"copy": "copy in GPU memory", "host to device": "copy from pinned host memory", "device to host": "copy to pinned host memory"}
    rows = []
    for case in cases:
        if (name := names.get(case["case"])) and case.get("bytes_per_second"):
            ours, theirs = (side.get("bytes_per_second", 0) / 1e9 or None for side in (case, case["torch"]))
            rows.append([f"{name}, GB/s", *map(results.significant, (ours, theirs, theirs))])
        if case["case"] == "launch" and case.get("seconds"):
            ours, theirs = (side.get("seconds", 0) * 1e6 or None for side in (case, case["torch"]))
            rows.append(["launch of a kernel, µs", *map(results.significant, (ours, theirs, theirs))])
    if rows:
        results.write(
            folder,
            "copies",
            "Copies and launches of a GPU",
            "benches/gpu/run --only rates",
            "A matrix of 256 MiB, and a kernel of eight elements.",
            ["case", "Firebrick", "PyTorch, least", "PyTorch, most"],
            rows,
            peer,
            machine,
        )


def group(case: dict) -> str | None:
    """The row that a case belongs to."""
    name, rows = case.get("name", ""), case.get("rows", 0)
    if case["case"] == "attention":
        return f"attention, {case['pass']}"
    if case["case"] != "product":
        return None
    if " decode " in name:
        return f"decoding, {rows:,} sequences"
    if name.startswith("square"):
        return f"matmul, {rows:,} cubed"
    if name.endswith("lm_head"):
        return f"heads, {rows:,} tokens"
    return f"layers, {rows:,} tokens, {PASSES[case['pass']]}"


def row(name: str, ours: float | None, theirs: float | None, ratio: float | None) -> list:
    return [name, *map(results.significant, (ours, theirs, ratio))]


def over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def ends(found: list[float]) -> list[float | None]:
    return [results.significant(min(found)), results.significant(max(found))] if found else [None, None]
