"""What `trainer.logger` writes, read back by the programs that it is for: TensorBoard's EventAccumulator and Trackio's Python API.

A short run is trained in two sessions, the second of which continues from a checkpoint before the last step of the first. Every number of
metrics.jsonl must be what the readers find, and no other: exactly for Trackio, rounded to f32 for TensorBoard, whose scalars are f32.
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from python_packages import environment  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ["tensorboard==2.21.0", "trackio==0.43.0"]
STEPS = 6


def f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def same(found, written):
    """Whether a number that was read is the one of metrics.jsonl, which has null where it is not finite."""
    if written is None:
        return not math.isfinite(found)
    return found == written


def from_tensorboard(folder):
    """The scalars as {(step, name): value}, and the names of texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    numbers, texts = {}, {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert (event.step, name) not in numbers, f"{name} of step {event.step} is there twice"
            numbers[event.step, name] = event.value
    for name in events.Tags()["tensors"]:
        for event in events.Tensors(name):
            texts.setdefault(name, []).append(tensor_util.make_ndarray(event.tensor_proto).ravel()[0].decode())
    return numbers, texts


def from_trackio(project):
    """The metrics of the one run of a project likewise, and its configuration."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(trackio.Api().runs(project))
    assert len(runs) == 1, f"one run: {runs}"
    numbers = {}
    for row in SQLiteStorage.get_logs(project, run_id=runs[0].id):
        for name, value in row.items():
            if name not in ("step", "timestamp"):
                assert (row["step"], name) not in numbers, f"{name} of step {row['step']} is there twice"
                numbers[row["step"], name] = value
    return numbers, runs[0].config


def compare(who, found, lines, rounded):
    wanted = {(line["training/global_step"], name): value for line in lines for name, value in line.items()}
    missing, extra = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    assert not missing and not extra, f"{who}: missing {sorted(missing)[:5]}, not written {sorted(extra)[:5]}"
    for key, value in wanted.items():
        value = value if value is None else rounded(value)
        assert same(found[key], value), f"{who}: {key}: {found[key]} instead of {value}"
    print(f"ok      {who}: {len(wanted)} numbers of {len(lines)} lines")


def read_back(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["training/global_step"] for line in lines] == list(range(STEPS + 1))
    numbers, texts = from_tensorboard(run / "tensorboard")
    compare("TensorBoard's EventAccumulator", numbers, lines, f32)
    assert {"config", "samples/best", "samples/worst"} <= texts.keys(), texts.keys()
    assert "train_batch_size" in texts["config"][0] and "**completion**" in texts["samples/best"][0]
    print(f"ok      TensorBoard's texts: {', '.join(sorted(texts))}")
    numbers, config = from_trackio("campaign")
    compare("Trackio's API", numbers, lines, lambda value: value)
    assert config["trainer"]["train_batch_size"] == 4, config
    # Trackio itself continues in the database: its schema is brought up to date, and what is there stays
    import trackio

    trackio.init(project="campaign", name="another", embed=False)
    trackio.log({"loss": 0.5})
    trackio.finish()
    names = sorted(run.name for run in trackio.Api().runs("campaign"))
    assert names == ["another", "first"], names
    print(f"ok      Trackio {trackio.__version__} logs another run into the same database")


def train(options, folder):
    run = folder / "first"
    config = folder / "config.yaml"
    config.write_text(
        "model: {arch: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2, "
        "max_position_embeddings: 32}}\n"
        "task: {kind: arithmetic, difficulty: 1, validation_size: 10}\n"
        f"output: {run}\ndevice: cpu\nrollout: {{n: 4, prompt_length: 6, response_length: 4}}\n"
        "trainer: {train_batch_size: 4, test_freq: 2, save_freq: 2, logger: [file, tensorboard, trackio], project_name: campaign}\n"
    )
    program = [options.firebrick, "train", str(config)]
    subprocess.run([*program, "trainer.steps=5"], check=True)
    # as if the first session had been killed after step 5: its last checkpoint is of step 4
    shutil.rmtree(run / "checkpoints/step-000005")
    subprocess.run([*program, f"trainer.steps={STEPS}", "--resume"], check=True)
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"), help="the program (default: %(default)s)")
    parser.add_argument("--venv", type=pathlib.Path, help="a virtual environment that has the packages, instead of a new one")
    parser.add_argument("--read-back", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read_back:
        return read_back(options.read_back)
    with tempfile.TemporaryDirectory(prefix="firebrick-trackers-") as folder:
        folder = pathlib.Path(folder)
        os.environ["TRACKIO_DIR"] = str(folder / "trackio")
        python = environment(options.venv or folder / "venv", PACKAGES)
        run = train(options, folder)
        subprocess.run([python, __file__, "--read-back", str(run)], check=True)
        print(f"all checks hold with {' '.join(PACKAGES)}")


if __name__ == "__main__":
    main()
