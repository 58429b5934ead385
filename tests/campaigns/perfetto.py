"""The trace of `firebrick train --profile N`, parsed by Perfetto's own protocol buffers: slices nest, and phases take the time that
metrics.jsonl says they took."""

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from python_packages import environment  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ["perfetto==0.59.1"]
STEPS, PROFILED = 4, [2, 3]
# seconds that a phase's slice may differ from its time: reading memory and bringing models to their place is in one and not the other
TOLERANCE = 0.01


def slices(packets):
    """Every slice as (track, parents, name, category, begin, end) in nanoseconds; fails where one does not nest."""
    open_slices, done, last = collections.defaultdict(list), [], collections.defaultdict(int)
    for packet in packets:
        event = packet.track_event
        if event.type not in (event.TYPE_SLICE_BEGIN, event.TYPE_SLICE_END):
            continue
        track = event.track_uuid
        assert packet.timestamp >= last[track], f"time runs backwards on track {track}"
        last[track] = packet.timestamp
        if event.type == event.TYPE_SLICE_BEGIN:
            open_slices[track].append((event.name, event.categories[0], packet.timestamp))
        else:
            name, category, begin = open_slices[track].pop()
            parents = tuple(parent[0] for parent in open_slices[track])
            done.append((track, parents, name, category, begin, packet.timestamp))
    assert not any(open_slices.values()), f"slices without an end: {dict(open_slices)}"
    return done


def parse(run):
    # this file has the package's name, and stands before it in Python's path
    here = pathlib.Path(__file__).resolve().parent
    sys.path[:] = [folder for folder in sys.path if pathlib.Path(folder).resolve() != here]
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2

    trace = perfetto_trace_pb2.Trace()
    trace.ParseFromString((run / "profile.pftrace").read_bytes())
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    used = {p.track_event.track_uuid for p in trace.packet if p.HasField("track_event")}
    assert used <= tracks.keys(), f"events of undeclared tracks: {used - tracks.keys()}"
    for packet in trace.packet:
        # a field that Perfetto does not know would be kept as an unknown one, and written again
        assert packet.trusted_packet_sequence_id == 1
    assert len(trace.SerializeToString()) == (run / "profile.pftrace").stat().st_size
    found = slices(trace.packet)
    steps = {name: end - begin for _, parents, name, _, begin, end in found if not parents and name.startswith("step ")}
    assert list(steps) == [f"step {step}" for step in PROFILED], steps
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    compared = 0
    for line in lines:
        step = f"step {line['training/global_step']}"
        if step not in steps:
            continue
        assert abs(steps[step] / 1e9 - line["timing_s/step"]) < TOLERANCE, (step, steps[step], line["timing_s/step"])
        phases = collections.Counter()
        for _, parents, name, category, begin, end in found:
            if parents == (step,) and category == "phase":
                phases[name] += end - begin
        timed = {name[len("timing_s/"):]: seconds for name, seconds in line.items() if name.startswith("timing_s/")}
        for name, nanoseconds in phases.items():
            assert abs(nanoseconds / 1e9 - timed[name]) < TOLERANCE, (step, name, nanoseconds, timed[name])
            compared += 1
        missing = timed.keys() - phases.keys() - {"step", "testing", "testing_reward"}
        assert not missing, f"{step} has no slices of {missing}"
    categories = collections.Counter(category for _, _, _, category, _, _ in found)
    assert {"step", "phase", "pass", "kernel", "segment"} <= categories.keys(), categories
    counters = {uuid for uuid, track in tracks.items() if track.HasField("counter")}
    values = [p.track_event for p in trace.packet if p.track_event.type == p.track_event.TYPE_COUNTER]
    assert values and {event.track_uuid for event in values} <= counters
    assert all(event.counter_value >= 0 for event in values) and any(event.counter_value > 0 for event in values)
    names = sorted(tracks[uuid].name for uuid in counters)
    print(f"ok      {len(found)} slices nest: {dict(categories)}")
    print(f"ok      {compared} phases of {len(steps)} steps take the time of metrics.jsonl to {TOLERANCE} s")
    print(f"ok      {len(values)} values of {len(names)} counters: {', '.join(names)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"), help="the program (default: %(default)s)")
    parser.add_argument("--venv", type=pathlib.Path, help="a virtual environment that has the packages, instead of a new one")
    parser.add_argument("--parse", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parse:
        return parse(options.parse)
    with tempfile.TemporaryDirectory(prefix="firebrick-perfetto-") as folder:
        folder = pathlib.Path(folder)
        python = environment(options.venv or folder / "venv", PACKAGES)
        run, config = folder / "run", folder / "config.yaml"
        config.write_text(
            "model: {arch: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2, "
            "max_position_embeddings: 64}}\n"
            "task: {kind: arithmetic, difficulty: 2, validation_size: 10}\n"
            f"output: {run}\ndevice: cpu\nrollout: {{n: 4, prompt_length: 8, response_length: 8}}\n"
            "memory: {gradient_checkpointing: true, activation_offload: true}\n"
            f"trainer: {{steps: {STEPS}, train_batch_size: 8, logger: file}}\n"
        )
        subprocess.run([options.firebrick, "train", str(config), "--profile", str(len(PROFILED))], check=True)
        subprocess.run([python, __file__, "--parse", str(run)], check=True)
        print(f"all checks hold with {' '.join(PACKAGES)}")


if __name__ == "__main__":
    main()
