"""Fuzz targets of all parsers under libFuzzer.

    tests/campaigns/run fuzz [TARGET …] [--minutes 10] [--jobs 1] [--json FILE]

It needs Linux, Rust's stable toolchain and a C++ compiler. Minutes are CPU time of a target, so that a busy machine tests as much as an
idle one. Each target starts from fuzz/seeds/TARGET, fixtures of the same format and what
earlier runs found (fuzz/corpus/TARGET). A panic, an input that takes over 30 s or 2 GiB of memory is a failure, and its input is in
fuzz/artifacts/TARGET: fix the parser and put the input, as short as possible, into fuzz/seeds/TARGET, which CI's tests read.
An input that the program refuses for its memory is no failure: it ends the target, which starts again.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUZZ = ROOT / "fuzz"
# inputs of targets among fixtures and examples, besides fuzz/seeds
FIXTURES = {
    "adapter": ["tests/fixtures/train/*/adapter_config.json"],
    "arch": ["tests/fixtures/models/*/config.json"],
    "chat_template": ["tests/fixtures/chat_templates/*.jinja"],
    "config": ["examples/*.yaml"],
    "import_python": ["tests/fixtures/import/*/*.py"],
    "import_shell": ["tests/fixtures/import/*/*.sh"],
    "import_yaml": ["tests/fixtures/import/*/*.yaml", "tests/fixtures/import/*/*.json"],
    "rows_arrow": ["tests/fixtures/rows/*.arrow", "tests/fixtures/rows/*.feather"],
    "rows_csv": ["tests/fixtures/rows/*.?sv"],
    "rows_json": ["tests/fixtures/rows/*.json*"],
    "rows_parquet": ["tests/fixtures/rows/*.parquet"],
    "tokenizer_config": ["tests/fixtures/models/*/tokenizer_config.json"],
}
# libFuzzer follows the branches of Firebrick's crates: other crates are built as usual
COUNTERS = "-Cpasses=sancov-module --cfg fuzzing" + "".join(
    f" -Cllvm-args=-sanitizer-coverage-{part}" for part in ("level=4", "inline-8bit-counters", "pc-table", "trace-compares")
)
# exit code of a target: fuzz/src/lib.rs
REFUSED = 77
LIMITS = ["-timeout=30", "-rss_limit_mb=2048", "-max_len=32768", "-print_final_stats=1"]


def build(targets):
    # the same dependencies; Cargo adds libFuzzer's
    shutil.copy(ROOT / "Cargo.lock", FUZZ / "Cargo.lock")
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "fuzz"
    wrapper = ROOT / "tests/campaigns/support/instrument"
    added = {"INSTRUMENT": "firebrick.*|math-answer", "INSTRUMENT_FLAGS": COUNTERS}
    environment = dict(os.environ, CARGO_TARGET_DIR=str(folder), RUSTC_WRAPPER=str(wrapper), **added)
    bins = [word for name in targets for word in ("--bin", name)]
    subprocess.run(["cargo", "build", *bins], cwd=FUZZ, env=environment, check=True)
    return folder / "debug"


def run(program, name, seconds):
    """True if the target met no failure, and the line of a table: CPU minutes, inputs, refusals."""
    corpus, artifacts = FUZZ / "corpus" / name, FUZZ / "artifacts" / name
    for folder in (corpus, artifacts):
        folder.mkdir(parents=True, exist_ok=True)
    # each input is a file: in memory, if the system has such a folder
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    used, inputs, refusals, code = 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as given, tempfile.TemporaryDirectory(dir=memory) as temporary:
        for pattern in FIXTURES.get(name, []):
            for at, file in enumerate(sorted(ROOT.glob(pattern))):
                shutil.copy(file, Path(given) / f"{at}-{file.name}")
        folders = [str(corpus), given] + [str(FUZZ / "seeds" / name)]
        command = [str(program / name), *LIMITS, f"-artifact_prefix={artifacts}/", *folders]
        while used < seconds and code == 0:
            code, took, text = fuzzed(command, temporary, seconds - used)
            used += took
            # no statistics after a refusal: the number at the last new input
            counts = re.findall(r"^#(\d+)|number_of_executed_units: (\d+)", text, re.MULTILINE)
            inputs += max((int(shown or whole) for shown, whole in counts), default=0)
            if code == REFUSED and "INITED" in text:
                refusals, code = refusals + 1, 0
    print(f"{name}: {inputs} inputs in {used / 60:.1f} minutes, {refusals} of them refused for their memory, exit code {code}", flush=True)
    if code == REFUSED:
        print(f"an input of {', '.join(folders)} takes more memory than such a file needs", flush=True)
    elif code != 0:
        print(text[-4000:], flush=True)
    return code == 0, [f"`{name}`", round(used / 60, 1), inputs, refusals]


def fuzzed(command, temporary, seconds):
    """Exit code, CPU seconds and output of a fuzzer that ends by itself or after `seconds`."""
    with open(Path(temporary) / "said", "w+", errors="replace") as said:
        fuzzer = subprocess.Popen(command, stdout=said, stderr=said, env=dict(os.environ, TMPDIR=temporary))
        ended = 0
        while ended == 0 and cpu_seconds(fuzzer.pid) < seconds:
            time.sleep(0.5)
            ended, status, usage = os.wait4(fuzzer.pid, os.WNOHANG)
        if ended == 0:
            # libFuzzer ends in good order
            fuzzer.send_signal(signal.SIGUSR1)
            _, status, usage = os.wait4(fuzzer.pid, 0)
        fuzzer.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        return fuzzer.returncode, usage.ru_utime + usage.ru_stime, said.read()


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in (FUZZ / "fuzz_targets").glob("*.rs"))
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"one of {', '.join(known)}")
    parser.add_argument("--minutes", type=float, default=10, help="minutes of CPU time per target")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--json", type=Path, help="writes the figures as a file of benches/results")
    arguments = parser.parse_args()
    targets = arguments.targets or known
    unknown = set(targets) - set(known)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    program = build(targets)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda name: run(program, name, int(60 * arguments.minutes)), targets))
    passed = sum(ok for ok, _ in results)
    if arguments.json:
        git = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        result = {
            "bench": "fuzz", "title": "Fuzzing", "date": time.strftime("%Y-%m-%d"), "machine": "", "commit": git.stdout.strip(),
            "command": f"tests/campaigns/run fuzz --minutes {arguments.minutes:g}",
            "what": "Inputs of each parser under libFuzzer. The parser refused some for the memory that they would take.",
            "columns": ["target", "CPU, min", "inputs", "refused"], "rows": [row for ok, row in results if ok],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{passed} passed, {len(results) - passed} failed")
    sys.exit(passed < len(results))


main()
