"""A million rows: how long until the first step can begin, and how much memory the whole process takes."""

import argparse
import gzip
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST_SECONDS = 10
MOST_BYTES = 300_000_000
CONFIG = """
model:
  arch: {{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
         max_position_embeddings: 512}}
  tokenizer: {tokenizer}
task: {{kind: dataset, train: {rows}, rewards: [{{kind: number}}]}}
output: {output}
device: cpu
rollout: {{n: 2, prompt_length: 256, response_length: 8}}
trainer: {{steps: 1, train_batch_size: 4, save_freq: -1}}
"""


def row(i):
    """A row as verl's preprocessing of GSM8K writes it."""
    question = (
        f"Warehouse {i} holds {i % 97} boxes on each of {i % 89} shelves, and {i % 7} trucks bring {i % 53} boxes more each. "
        "How many boxes are there when all trucks have been unloaded? Let's think step by step and output the final answer after \"####\"."
    )
    answer = str(i % 97 * (i % 89) + i % 7 * (i % 53))
    return {
        "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": question}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer}, "extra_info": {"split": "train", "index": i, "answer": answer},
    }


def write(path, rows):
    opened = gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else open(path, "w", encoding="utf-8")
    with opened as file:
        for i in range(rows):
            file.write(json.dumps(row(i)) + "\n")


def measure(firebrick, folder, path):
    """Seconds until the run says that it is ready, and the most bytes that it held to its end."""
    config = folder / "run.yaml"
    tokenizer = ROOT / "tests/fixtures/models/llama-rope-llama3"
    config.write_text(CONFIG.format(tokenizer=tokenizer, rows=path, output=folder / f"run-{path.name}"))
    began = time.monotonic()
    process = subprocess.Popen([firebrick, "train", str(config)], stderr=subprocess.PIPE, text=True)
    ready, said = None, []
    for line in process.stderr:
        said.append(line)
        if ready is None and line.startswith("training "):
            ready = time.monotonic() - began
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0 or ready is None:
        sys.exit("".join(said))
    return ready, usage.ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for ending in ("jsonl", "jsonl.gz"):
            path = folder / f"rows.{ending}"
            write(path, options.rows)
            seconds, peak = measure(options.firebrick, folder, path)
            holds = seconds < MOST_SECONDS and peak < MOST_BYTES
            failed |= not holds
            print(
                f"{'ok' if holds else 'FAILED':8}{options.rows:,} rows, .{ending}, {path.stat().st_size / 1e6:.0f} MB: "
                f"ready after {seconds:.1f} s, peak {peak / 1e6:.0f} MB"
            )
            path.unlink()
    sys.exit(failed)


if __name__ == "__main__":
    main()
