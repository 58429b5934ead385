"""Ranks that are killed: everything ends within seconds, and the resumed run is the one that nobody disturbed.

    tests/campaigns/run killed_ranks [--firebrick PROGRAM] [--points 60] [--seed 0]

PROGRAM is built with the feature `mpi`; cargo builds it where absent. A small run of 12 steps that saves after each is started under
`mpirun -n 2`, by turns without ZeRO, with ZeRO-2 and ZeRO-3, with ranks that share matrices, sequences or layers, and one of its ranks is
killed (SIGKILL) at a random moment: a third of the moments lie in a save, which begins when a folder `….tmp` appears. The launcher has to report a failure, and no process of the run may be
left after 5 seconds. What stands in `checkpoints` is whole, and the run that continues from it with `--resume` has the metrics, those of time
and memory apart, and the weights of the undisturbed one.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS, MOST = 12, 5.0
CONFIG = """
model:
  arch: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3, num_attention_heads: 4,
         max_position_embeddings: 32}
task: {kind: arithmetic, difficulty: 1, partial: true, validation_size: 5}
output: run
device: cpu
rollout: {n: 8, prompt_length: 6, response_length: 8}
update: {ppo_mini_batch_size: 8}
optim: {lr: 1e-3}
memory: {gradient_checkpointing: true}
trainer: {steps: 12, train_batch_size: 16, seed: 5, save_freq: 1, max_ckpt_to_keep: 2}
"""
# what the two ranks share
WAYS = {
    "nothing": [],
    "ZeRO-2": ["memory.zero_stage=2"],
    "ZeRO-3": ["memory.zero_stage=3"],
    "matrices": ["memory.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"],
    "sequences": ["memory.ulysses_sequence_parallel_size=2"],
    "layers": ["memory.pipeline_model_parallel_size=2"],
}
MPIRUN = ["mpirun", "--oversubscribe", "-n", "2"]
ENVIRONMENT = {
    **os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_plm": "isolated",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "RAYON_NUM_THREADS": "1",
}


def built():
    command = ["cargo", "build", "--release", "--no-default-features", "--features", "mpi", "--bin", "firebrick"]
    subprocess.run(command, cwd=ROOT, check=True)
    about = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, capture_output=True, check=True)
    return str(Path(json.loads(about.stdout)["target_directory"]) / "release/firebrick")


def start(firebrick, folder, way, *more):
    command = [*MPIRUN, firebrick, "train", "config.yaml", *WAYS[way], "--quiet", *more]
    with (folder / "said.txt").open("ab") as said:
        return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=said, stderr=said)


def ranks(launcher):
    """Processes that the launcher has started."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == launcher.pid and fields[0] != "Z":
                found.append(int(process.name))
    return sorted(found)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def is_of_a_machine(name):
    return name.startswith(("timing_", "perf/")) or name.endswith("_per_second")


def result(run):
    """Metrics by step, and the sum of the last model's files."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    metrics = {}
    for line in lines:
        own = {name: value for name, value in line.items() if not is_of_a_machine(name)}
        metrics.setdefault(line.get("training/global_step"), {}).update(own)
    digest = hashlib.sha256()
    for file in sorted((run / f"checkpoints/step-{STEPS:06}/model").iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return metrics, digest.hexdigest()


def moment(run, launcher, seconds, in_save, rng):
    """Waits for the moment of a kill; says what it was."""
    end = time.monotonic() + rng.uniform(0.0, seconds)
    while launcher.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    if not in_save:
        return "at any time"
    while launcher.poll() is None:
        if any((run / "checkpoints").glob("*.tmp")):
            time.sleep(rng.uniform(0.0, 0.01))
            return "in a save"
    return "at the end"


def check(firebrick, folder, way, seconds, expected, in_save, rng):
    """One run with a kill. Returns what was wrong, and what it was."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    launcher = start(firebrick, folder, way)
    what = moment(run, launcher, seconds, in_save, rng)
    own = ranks(launcher)
    if len(own) < 2:
        launcher.wait()
        return None, "before there were ranks, or after the end"
    os.kill(rng.choice(own), signal.SIGKILL)
    killed = time.monotonic()
    try:
        code = launcher.wait(timeout=60)
    except subprocess.TimeoutExpired:
        launcher.kill()
        return "the launcher was there after a minute", what
    took = time.monotonic() - killed
    while any(map(alive, own)) and time.monotonic() - killed < 60:
        time.sleep(0.01)
    took = max(took, time.monotonic() - killed)
    if code == 0:
        return "the launcher reported success", what
    if took > MOST:
        return f"processes were there {took:.1f} s later", what
    # whoever reads checkpoints passes folders by that were not finished (`.tmp`), or were being removed (`.removed`)
    saved = [path.name for path in (run / "checkpoints").glob("step-*") if not path.suffix] if run.is_dir() else []
    for name in saved:
        if not (run / "checkpoints" / name / "model").is_dir():
            return f"{name} has no model", what
    if not saved:
        return None, f"{what}, before the first checkpoint"
    again = start(firebrick, folder, way, "--resume")
    if again.wait(timeout=300) != 0:
        return "the run did not resume: " + (folder / "said.txt").read_text()[-600:], what
    metrics, weights = result(run)
    if weights != expected[1]:
        return "other weights after resuming", what
    different = [step for step in expected[0] if metrics.get(step) != expected[0][step]]
    return (f"other metrics at steps {different}" if different else None), what


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--firebrick", help="a program with the feature `mpi`; cargo builds it where absent")
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    firebrick, rng, wrong, moments = options.firebrick or built(), random.Random(options.seed), 0, Counter()
    with tempfile.TemporaryDirectory() as name:
        undisturbed = {}
        for way in WAYS:
            folder = Path(name) / way
            folder.mkdir()
            (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
            started = time.monotonic()
            if start(firebrick, folder, way).wait(timeout=300) != 0:
                sys.exit((folder / "said.txt").read_text())
            undisturbed[way] = (folder, time.monotonic() - started, result(folder / "run"))
        for point in range(options.points):
            way = list(WAYS)[point % len(WAYS)]
            folder, seconds, expected = undisturbed[way]
            in_save = point // len(WAYS) % 3 == 2
            problem, what = check(firebrick, folder, way, seconds, expected, in_save, rng)
            moments[what] += 1
            wrong += problem is not None
            if problem:
                print(f"FAILED  point {point}, sharing {way}, {what}: {problem}", flush=True)
    print("; ".join(f"{count} {what}" for what, count in sorted(moments.items())))
    print(f"{'FAILED' if wrong else 'ok':8}{options.points} kills of one of two ranks, {wrong} of them not as promised")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
