"""The heap of every rank under mpirun beside what its plan predicts.

    tests/campaigns/run rank_memory [--firebrick PROGRAM] [--ranks 4]

PROGRAM is built with the feature `mpi`; cargo builds it where absent. A decoder of 38 M parameters takes three steps of GRPO with a reference
policy under `mpirun`, a process a rank: with all weights on every rank, and with ZeRO-3. Of its 32,768 tokens one ends a completion, so that
nearly all have the full length that predictions assume. Prints a row for each, and fails where a rank's counted heap is further from the
prediction than PLANS says.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from killed_ranks import ENVIRONMENT, built

# with as many threads as one rank alone has: what products pack depends on it
THREADS = {name: value for name, value in ENVIRONMENT.items() if name != "RAYON_NUM_THREADS"}
CONFIG = """
model:
  arch: {model_type: llama, vocab_size: 32768, hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 8, num_attention_heads: 8, head_dim: 48,
         num_key_value_heads: 4, max_position_embeddings: 512, tie_word_embeddings: false}
task: {kind: arithmetic, difficulty: 2, partial: true, validation_size: 4}
output: run
device: cpu
rollout: {n: 4, prompt_length: 16, response_length: 48}
update: {ppo_mini_batch_size: 8, old_log_probs: trainer}
objective: {kl_loss_coef: 0.05}
memory: {gradient_checkpointing: true}
trainer: {steps: 3, train_batch_size: 8, seed: 5, save_freq: 3, test_freq: 0}
"""
# settings, and how far a rank may be from the prediction
PLANS = {
    "nothing shared out": (["memory.zero_stage=0"], 0.10),
    "ZeRO-3": (["memory.zero_stage=3"], 0.10),
    "ZeRO-3, sampling together": (["memory.zero_stage=3", "rollout.tensor_model_parallel_size=RANKS"], 0.15),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--firebrick", help="a program with the feature `mpi`; cargo builds it where absent")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    firebrick, wrong = options.firebrick or built(), 0
    print("| plan | predicted, MiB | counted by rank, MiB | furthest |\n|---|---:|---|---:|")
    for name, (settings, most) in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.yaml").write_text(CONFIG, encoding="utf-8")
            own = [setting.replace("RANKS", str(options.ranks)) for setting in settings]
            command = ["mpirun", "--oversubscribe", "-n", str(options.ranks), firebrick, "train", "config.yaml", "--quiet", *own]
            done = subprocess.run(command, cwd=folder, env=THREADS, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(done.stdout + done.stderr)
            summary = json.loads((Path(folder) / "run/summary.json").read_text(encoding="utf-8"))
        predicted, counted = summary["predicted_peak_bytes"], summary["rank_peak_bytes"]
        off = max((predicted - own) / own for own in counted), min((predicted - own) / own for own in counted)
        furthest = max(off, key=abs)
        wrong += abs(furthest) > most
        by_rank = ", ".join(f"{own / 2**20:.1f}" for own in counted)
        print(f"| {name} | {predicted / 2**20:.1f} | {by_rank} | {100 * furthest:+.1f} % |", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
