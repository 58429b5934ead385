"""What `run` does, stage by stage. A stage returns rows for the table and figures for the JSON, or raises `Failed`."""

import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import measure
import workload
from build import HERE, ROOT

GIB = 2**30
GROWTH_STEPS = 1000
# Readings of in-use bytes may differ by this much, or a hundredth.
GROWTH_BYTES = 2**20
# As benches/techniques.rs has them; two spaces: beside gradient_checkpointing.
TECHNIQUES = [
    "plain",
    "gradient_checkpointing",
    "  activation_offload",
    "  param_offload streamed",
    "grad_offload",
    "optimizer_offload cpu",
    "optimizer_offload idle",
    "moments block8",
    "lora, rank 16",
]


class Failed(Exception):
    """A stage that did not do what it should, with what it found all the same."""

    def __init__(self, why: str, result: "Result | None" = None) -> None:
        super().__init__(why)
        self.result = result or Result()


@dataclass
class Row:
    """A line of the table. `ratio` is PyTorch's time over Firebrick's, or Firebrick's bytes over PyTorch's."""

    what: str
    ours: str = ""
    theirs: str = ""
    ratio: float | None = None


@dataclass
class Result:
    rows: list[Row] = field(default_factory=list)
    figures: dict = field(default_factory=dict)


@dataclass
class Context:
    """What every stage runs with."""

    programs: dict[str, Path]
    # What they need in their environment beside what is there.
    env: dict[str, str]
    device: str
    precision: str
    small: bool
    # The interpreter of the PyTorch side, or why there is none; both None where it is not wanted.
    python: str | None
    no_peer: str | None
    torch_device: str
    # Folder of SmolLM2-135M-Instruct, if it is here.
    model: Path | None
    folder: Path

    def program(self, name: str) -> Path:
        if name not in self.programs:
            raise Failed(f"the program `{name}` is missing here; pack the archive again")
        return self.programs[name]

    def ours(self, name: str, words: list, limit: float, log: str, settings: dict | None = None) -> measure.Finished:
        # tests find the project by this
        env = self.env | {"CARGO_MANIFEST_DIR": str(ROOT), f"FIREBRICK_REQUIRE_{self.device.upper()}": "1"} | (settings or {})
        return measure.run([self.program(name), *words], limit, self.folder / f"{log}.log", env)

    def peer(self, script: str, words: list, limit: float, log: str) -> measure.Finished:
        env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
        if self.torch_device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        command = [self.python, HERE / script, *words, "--device", self.torch_device]
        return measure.run(command, limit, self.folder / f"{log}.log", env)


def lines(path: Path) -> list[dict]:
    """The whole lines of a JSON Lines file; none where there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def size(count: float | None) -> str:
    """Bytes as a person reads them."""
    if not count:
        return ""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.2f} MiB"


def over(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


def parity(context: Context, limit: float) -> Result:
    """The tests of this device in the test binary: kernels, and what runs on every device."""
    kind = context.device
    listed = context.ours("suite", ["--list", "--format=terse"], limit, "parity-list")
    if not listed.ok:
        raise Failed(listed.why())
    names = [line.removesuffix(": test") for line in listed.output.splitlines() if line.endswith(": test")]
    wanted = [name for name in names if f"::{kind}::" in name]
    if not wanted:
        raise Failed(f"the test binary has no tests of {kind}: build it with --features {kind}")
    # a process compiles one kernel at a time
    processes = max(1, min(len(wanted), (os.cpu_count() or 1) * 3 // 4))
    run = lambda i: context.ours("suite", ["--exact", *wanted[i::processes]], limit - listed.seconds, f"parity-{i}")
    with ThreadPoolExecutor(processes) as pool:
        parts = list(pool.map(run, range(processes)))
    said = [line for done in parts for line in done.output.splitlines()]
    passed = sum(line.startswith("test ") and line.endswith(" ok") for line in said)
    left_out = sum("parity: not run: " in line for line in said)
    note = f", of which {left_out} had nothing to do here" if left_out else ""
    result = Result(
        rows=[Row("tests passed", f"{passed} of {len(wanted)}{note}")],
        figures={"passed": passed, "left_out": left_out, "tests": len(wanted), "seconds": max(done.seconds for done in parts)},
    )
    if failed := next((done for done in parts if not done.ok), None):
        raise Failed(failed.why(), result)
    if passed < len(wanted):
        raise Failed(f"{len(wanted) - passed} tests said nothing", result)
    return result


def kernels(context: Context, limit: float) -> Result:
    """Bytes that each fused kernel moves, over the time it takes, beside a copy."""
    home = context.folder / "criterion"
    settings = {"FIREBRICK_BENCH_DEVICE": context.device, "FIREBRICK_BENCH_SMALL": str(int(context.small)), "CRITERION_HOME": str(home)}
    # without --bench criterion would run every case once; some ninety cases of half a second
    words = ["--bench", "--noplot", "--warm-up-time", "0.1", "--measurement-time", "0.3", "--nresamples", "1000"]
    done = context.ours("kernels", words, limit, "kernels", settings)
    found = criterion_cases(home)
    result = Result(figures={"kernels": found})
    copies = {case["dtype"]: case["bytes"] / case["seconds"] for case in found if case["kernel"] == "elementwise/copy"}
    for case in found:
        rate = case["bytes"] / case["seconds"]
        case["of_copy"] = rate / copies[case["dtype"]] if case["dtype"] in copies else None
        share = "" if case["of_copy"] is None else f" ({case['of_copy']:.0%} of a copy)"
        result.rows.append(Row(f"{case['kernel']} {case['dtype']}", f"{rate / 1e9:.4g} GB/s{share}"))
    if not done.ok or not found:
        raise Failed(done.why(), result)
    return result


def launches(context: Context, limit: float) -> Result:
    """Kernels and the host's time of a decoding step, in each of its ways, and of a micro-batch; captured steps of more sequences and
    of a smaller model."""
    result, problems = Result(figures={"launches": []}), []
    for model, arch, rows in workload.decoded(context.small):
        config, output = (context.folder / f"launches-{model}-{rows}{end}" for end in (".json", ".jsonl"))
        config.write_text(json.dumps(arch), encoding="utf-8")
        words = ["--bench", "--device", context.device, "--model", config, "--rows", rows, "--json", output]
        done = context.ours("launches", words + ["--small"] * context.small, limit, f"launches-{model}-{rows}")
        limit -= done.seconds
        found = [line for line in lines(output) if line["case"] in ("decoding step", "micro-batch")]
        for case in found:
            result.figures["launches"].append(case | {"model": model})
            what = f"{model}, {rows} sequences, {case['name']}" if "name" in case else f"{model}, {case['case']}"
            result.rows.append(Row(what, f"{case['kernels']:.0f} kernels, {case['seconds'] * 1e3:.3g} ms"))
        if not done.ok or not found:
            problems.append(f"{model}, {rows} sequences: {done.why()}")
    if problems:
        raise Failed("; ".join(problems), result)
    return result


def criterion_cases(home: Path) -> list[dict]:
    """What criterion measured, in the order in which it did: GROUP/KERNEL, type, bytes and the median of the seconds."""
    cases = []
    for estimates in sorted(home.rglob("new/estimates.json"), key=lambda path: path.stat().st_mtime_ns):
        case = json.loads((estimates.parent / "benchmark.json").read_text(encoding="utf-8"))
        nanoseconds = json.loads(estimates.read_text(encoding="utf-8"))["median"]["point_estimate"]
        kernel = f"{case['group_id']}/{case['function_id']}"
        bytes_moved = case["throughput"]["Bytes"]
        cases.append({"kernel": kernel, "dtype": case["value_str"], "bytes": bytes_moved, "seconds": nanoseconds / 1e9})
    return cases


def rates_of(*kinds: str, words: list[str] | None = None):
    """The stage of some kinds of cases of benches/rates, and the same cases in PyTorch."""

    def stage(context: Context, limit: float) -> Result:
        name = "-".join([kinds[0], *(words or [])[1:]])
        output, peer_output = (context.folder / f"{name}{end}.jsonl" for end in ("", "-peer"))
        asked = ["--device", context.device, "--only", ",".join(kinds), "--json", output, *(words or [])] + ["--small"] * context.small
        # the peer knows no autotuning: a third of the time is plenty
        done = context.ours("rates", asked, limit * (2 / 3 if context.python else 1), name)
        cases = lines(output)
        problems = [] if done.ok else [done.why()]
        if context.python and cases:
            peer = context.peer("rates_peer.py", [output, "--output", peer_output], limit - done.seconds, f"{name}-peer")
            if not peer.ok:
                problems.append(f"PyTorch: {peer.why()}")
        elif context.no_peer:
            problems.append(context.no_peer)
        results = ("seconds", "tflops", "bytes_per_second", "of_best_square", "error", "kernels")
        key = lambda case: json.dumps({k: v for k, v in case.items() if k not in results}, sort_keys=True)
        theirs = {key(case): case for case in lines(peer_output)}
        result = Result(figures={"cases": []})
        for case in cases[1:]:
            other = theirs.get(key(case), {})
            result.figures["cases"].append(case | {"torch": {k: other[k] for k in results if k in other}})
            if "error" in case:
                problems.append(f"{named(case)}: {case['error']}")
            result.rows.append(Row(named(case), rate(case), rate(other), over(other.get("seconds"), case.get("seconds"))))
        if problems:
            raise Failed("; ".join(problems), result)
        return result

    return stage


def named(case: dict) -> str:
    """A case in a few words."""
    extent = f"{case['rows']} rows" if "rows" in case else case.get("batch", "")
    words = [case["case"], case.get("name", ""), case.get("dtype", ""), extent, case.get("pass", "")]
    return " ".join(word for word in words if word)


def rate(case: dict) -> str:
    """A case's figure, in the unit of its kind."""
    if "tflops" in case:
        share, flops = case.get("of_best_square"), case["tflops"]
        unit = f"{flops:.4g} TFLOP/s" if flops >= 1 else f"{flops * 1e3:.4g} GFLOP/s"
        return unit + (f" ({share:.0%})" if share else "")
    if "bytes_per_second" in case:
        return f"{case['bytes_per_second'] / 1e9:.4g} GB/s"
    return f"{case['seconds'] * 1e6:.3g} µs" if "seconds" in case else "failed" if "error" in case else ""


def growth(context: Context, limit: float) -> Result:
    """Bytes in use after 100 and after 1,000 steps."""
    folder = context.folder / "growth"
    folder.mkdir()
    config = folder / "run.yaml"
    config.write_text(json.dumps(workload.growth_config(folder, context.device, GROWTH_STEPS)), encoding="utf-8")
    done = context.ours("firebrick", ["train", config], limit, "growth")
    last = {line["step"]: line for line in lines(folder / "run" / "memory.jsonl")}
    early, late = last.get(GROWTH_STEPS // 10), last.get(GROWTH_STEPS)
    result = Result(figures={"steps": max(last, default=0), "seconds": done.seconds})
    if not done.ok or not early or not late:
        raise Failed(f"after {max(last, default=0)} of {GROWTH_STEPS} steps: {done.why()}", result)
    bytes_of = lambda line: {key: line[key] for key in ("source", "in_use_bytes", "reserved_bytes")}
    result.figures |= {"early": bytes_of(early), "late": bytes_of(late)}
    before, after = early["in_use_bytes"], late["in_use_bytes"]
    for step, line in ((GROWTH_STEPS // 10, early), (GROWTH_STEPS, late)):
        result.rows.append(Row(f"in use after step {step}", size(line["in_use_bytes"])))
    if after > before + max(GROWTH_BYTES, before // 100):
        raise Failed(f"memory grew from {before} to {after} bytes from step {GROWTH_STEPS // 10} to {GROWTH_STEPS}", result)
    return result


def step_of(model: str):
    """The stage of a GRPO step of one model."""

    def stage(context: Context, limit: float) -> Result:
        arch, sizes = workload.models(context.small)[model], workload.step(context.small)
        folder = context.folder / f"step-{model}"
        folder.mkdir()
        prompts = workload.prompts(arch["vocab_size"], sizes)
        workload.write_tokenizer(folder / "tokenizer", arch["vocab_size"])
        workload.write_prompts(folder / "prompts.jsonl", prompts)
        job = {"arch": arch, "sizes": sizes, "prompts": prompts}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        result, problems = Result(figures={"sizes": sizes, "precision": context.precision}), []

        mine, problem = step_ours(context, folder, limit * (0.65 if context.python else 1))
        problems += problem
        theirs = {}
        if context.python:
            theirs, problem = step_theirs(context, folder, limit - mine["wall_seconds"])
            problems += problem
        elif context.no_peer:
            problems.append(context.no_peer)
        result.figures |= {"firebrick": mine, "torch": theirs}
        result.rows = step_rows(sizes, mine, theirs)
        if problems:
            raise Failed("; ".join(problems), result)
        return result

    return stage


def beside(context: Context, limit: float, name: str, settings: dict) -> tuple[Result, dict, list[str]]:
    """A GRPO step of the smallest model with some settings, and without them; the last step of each."""
    model = next(iter(workload.models(context.small)))
    arch, sizes = workload.models(context.small)[model], workload.step(context.small)
    result, problems = Result(), []
    for side, wanted in {"plain": {}, name: settings}.items():
        folder = context.folder / f"{name}-{side}"
        folder.mkdir()
        workload.write_tokenizer(folder / "tokenizer", arch["vocab_size"])
        workload.write_prompts(folder / "prompts.jsonl", workload.prompts(arch["vocab_size"], sizes))
        (folder / "job.json").write_text(json.dumps({"arch": arch, "sizes": sizes}), encoding="utf-8")
        result.figures[side], problem = step_ours(context, folder, limit / 2, wanted)
        problems += problem
    last = {side: found["steps"][-1] for side, found in result.figures.items() if found["steps"]}
    if len(last) == 2:
        for part in ("gen", "update_actor"):
            seconds = [last[side][f"timing_s/{part}"] for side in (name, "plain")]
            ratio = seconds[0] / seconds[1]
            result.rows.append(Row(f"timing_s/{part}", f"{seconds[0]:.4g} s", f"{seconds[1]:.4g} s without; {ratio:.2f} of it"))
    return result, last, problems


def exact(context: Context, limit: float) -> Result:
    """A GRPO step with `rollout.exact` and without: what it costs, and how far sampler and trainer are apart."""
    result, last, problems = beside(context, limit, "exact", {"rollout": {"exact": True}})
    if len(last) == 2:
        apart = [last[side]["training/rollout_probs_diff_max"] for side in ("exact", "plain")]
        result.rows.append(Row("rollout_probs_diff_max", f"{apart[0]:.4g}", f"{apart[1]:.4g} without"))
        if apart[0] != 0:
            problems.append(f"sampler and trainer differ by {apart[0]}")
    if problems:
        raise Failed("; ".join(problems), result)
    return result


def cublaslt(context: Context, limit: float) -> Result:
    """Matmuls by cuBLASLt: a GRPO step with and without, and matmuls beside PyTorch's, which are cuBLAS's."""
    started = time.monotonic()
    result, _, problems = beside(context, limit * 0.7, "cublaslt", {"matmul": "cublaslt"})
    try:
        rates = rates_of("products", words=["--matmul", "cublaslt"])(context, limit - (time.monotonic() - started))
    except Failed as failed:
        problems.append(str(failed))
        rates = failed.result
    result.rows += rates.rows
    result.figures |= rates.figures
    if problems:
        raise Failed("; ".join(problems), result)
    return result


def step_ours(context: Context, folder: Path, limit: float, settings: dict | None = None) -> tuple[dict, list[str]]:
    """Two steps, of which the second counts; the first where time ran out before it. `settings` are added to those of `workload`."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    config = workload.step_config(folder, job["arch"], job["sizes"], context.device, context.precision, 2)
    for key, value in (settings or {}).items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    done = context.ours("firebrick", ["train", folder / "run.yaml"], limit, f"{folder.name}-firebrick")
    steps = [line for line in lines(folder / "run" / "metrics.jsonl") if "timing_s/update_actor" in line]
    found = {
        "wall_seconds": done.seconds,
        "peak_resident_bytes": done.peak_resident_bytes,
        "peak_driver_bytes": done.peak_driver_bytes,
        "steps": steps,
    }
    problems = [] if done.ok else [f"Firebrick: {done.why()}"]
    if steps:
        last = steps[-1]
        found |= {
            "warm": len(steps) > 1,
            "sampling": last["timing_s/gen"],
            "update": last["timing_s/update_actor"],
            "reserved_bytes": last["perf/max_memory_reserved_gb"] * GIB,
        }
        wanted = job["sizes"]["new_tokens"]
        if last["response_length/min"] != wanted:
            problems.append(f"Firebrick: a completion of {last['response_length/min']:.0f} tokens, {wanted} were wanted")
    return found, problems


def step_theirs(context: Context, folder: Path, limit: float) -> tuple[dict, list[str]]:
    output = folder / "peer.json"
    words = [folder / "job.json", "--dtype", context.precision, "--output", output]
    done = context.peer("peer.py", words, limit, f"{folder.name}-peer")
    found = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    found = {key: found.get(key) for key in ("sampling", "update")}
    parts = [part for part in found.values() if part]
    most = lambda key: max((part[key] for part in parts if part[key]), default=None)
    theirs = {key: part["seconds"] for key, part in found.items() if part}
    theirs |= {
        "wall_seconds": done.seconds,
        "peak_resident_bytes": done.peak_resident_bytes,
        "peak_driver_bytes": done.peak_driver_bytes,
        "recomputes": bool(found["update"] and found["update"].get("recomputes")),
        "allocated_bytes": most("allocated_bytes"),
        "reserved_bytes": most("reserved_bytes"),
    }
    return theirs, [] if done.ok else [f"PyTorch: {done.why()}"]


def step_rows(sizes: dict, mine: dict, theirs: dict) -> list[Row]:
    sequences = sizes["prompts"] * sizes["n"]
    tokens = {
        "sampling": sequences * sizes["new_tokens"],
        "update": sequences * (sizes["new_tokens"] + sizes["prompt_tokens"]),
    }
    both = lambda side: sum(side[part] for part in tokens) if all(side.get(part) for part in tokens) else None
    shown = lambda count, time: f"{count / time:,.0f} tokens/s" if time else ""
    rows = []
    for part, count in tokens.items():
        a, b = mine.get(part), theirs.get(part)
        recomputes = " (layers recomputed)" if part == "update" and theirs.get("recomputes") else ""
        rows.append(Row(part, shown(count, a), shown(count, b) + recomputes, over(b, a)))
    a, b = both(mine), both(theirs)
    note = "" if mine.get("warm", True) else " (first step, compiling included)"
    rows.append(Row("step" + note, f"{a:.2f} s" if a else "", f"{b:.2f} s" if b else "", over(b, a)))
    # the same instrument on both sides comes first
    for what, key in (
        ("peak by the driver", "peak_driver_bytes"),
        ("peak by its own count", "reserved_bytes"),
        ("peak resident set", "peak_resident_bytes"),
    ):
        a, b = mine.get(key), theirs.get(key)
        if a or b:
            rows.append(Row(what, size(a), size(b), over(a, b)))
    return rows


def real(context: Context, limit: float) -> Result:
    """SmolLM2-135M-Instruct learns word problems: validation, the first steps beside later ones, sampler beside trainer."""
    if not context.model:
        raise Failed("no model: name the folder of SmolLM2-135M-Instruct with --model")
    sys.path.append(str(ROOT / "tests/campaigns"))
    import smollm2

    folder = context.folder / "real"
    folder.mkdir()
    settings = smollm2.settings(folder, context.model.resolve(), folder / "run", context.device, smollm2.CURVE)
    if context.small:
        settings |= {"precision": "f32", "rollout": {"n": 2, "prompt_length": 128, "response_length": 8}}
        settings["trainer"] = smollm2.CURVE["trainer"] | {"steps": 3, "train_batch_size": 2, "test_freq": 0}
    (folder / "run.yaml").write_text(json.dumps(settings), encoding="utf-8")
    done = context.ours("firebrick", ["train", folder / "run.yaml", "--quiet"], limit, "real")
    found = lines(folder / "run" / "metrics.jsonl")
    steps = [line for line in found if "timing_s/step" in line]
    result = Result(figures={"seconds": done.seconds, "metrics": found})
    rewards = [(line["training/global_step"], line[smollm2.REWARD]) for line in found if smollm2.REWARD in line]
    result.rows += [Row(f"validation after step {step}", f"{100 * reward:.1f} %") for step, reward in rewards]
    if len(steps) > 2:
        times = [line["timing_s/step"] for line in steps]
        usual = statistics.median(times[2:])
        result.rows += [Row(f"step {i + 1}", f"{times[i]:.2f} s, {times[i] / usual:.1f} x the later ones' median") for i in (0, 1, 2)]
        drift = "training/rollout_probs_diff_max"
        result.rows.append(Row("largest difference of sampler and trainer", f"{max(line.get(drift, 0.0) for line in steps):.2g}"))
    if not done.ok or len(steps) < settings["trainer"]["steps"]:
        raise Failed(f"{len(steps)} steps: {done.why()}", result)
    return result


def techniques(context: Context, limit: float) -> Result:
    """One update under each memory technique."""
    model, arch = next(iter(workload.models(context.small).items()))
    sizes = workload.update(context.small)
    (context.folder / "arch.json").write_text(json.dumps(arch), encoding="utf-8")
    output = context.folder / "techniques.jsonl"
    words = ["--device", context.device, "--model", context.folder / "arch.json", "--precision", context.precision]
    words += ["--sequences", sizes["sequences"], "--length", sizes["length"], "--only", ";".join(TECHNIQUES)]
    done = context.ours("techniques", [*words, "--json", output], limit, "techniques")
    found = lines(output)
    result = Result(figures={"model": model, "sizes": sizes, "techniques": found})
    plain = found[0] if found and "error" not in found[0] else None
    for line in found:
        if "error" in line:
            result.rows.append(Row(line["technique"], "failed"))
            continue
        share = f" ({line['peak_bytes'] / plain['peak_bytes']:.0%} of plain)" if plain else ""
        bytes_ = f"{line['seconds'] * 1e3:.0f} ms, {size(line['peak_bytes'])}{share}"
        pace = f"time x {line['of_plain']:.2f}" if line["of_plain"] else ""
        result.rows.append(Row(line["technique"], f"{bytes_}, {pace}".rstrip(", ")))
    failures = [f"{line['technique']}: {line['error']}" for line in found if "error" in line]
    if not done.ok or failures:
        raise Failed("; ".join(failures if done.ok else [done.why(), *failures]), result)
    return result
