"""TRL's GRPOTrainer on the checkpoint and prompts of prepare.py: seconds and lengths of each step, written as JSON.

    peer.py FOLDER --size SIZE --sampling static|continuous --steps N --output FILE

Every step samples the size's completions and makes one update in f32, as fast as TRL does it on a CPU: no recomputing,
one batch, old log-probs from the update's own forward. `static` samples with `generate`, a batch that runs until its last
completion has ended; `continuous` with transformers' continuous batching (`generate_batch`). `sampling` is what
generation takes, `update` is the step without generation, rewards and advantages.
"""

import argparse
import json
import time
from pathlib import Path

from datasets import Dataset
from sizes import SIZES, Size
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# Tokens of a page of the continuous batches' cache, and of a forward: 64 rows of decoding and prompts beside them.
PAGE = 32
FORWARD = 512


def has_seven(completions, **_):
    return [float("7" in text[-2:]) for text in completions]


class Timed(GRPOTrainer):
    sampling = 0.0
    prepared = 0.0
    lengths: list[int] = []

    def _generate_single_turn(self, *args, **kwargs):
        started = time.perf_counter()
        out = super()._generate_single_turn(*args, **kwargs)
        self.sampling += time.perf_counter() - started
        completions = out[0]
        self.lengths = self.lengths + [len(ids) for ids in completions]
        return out

    def _prepare_inputs(self, inputs):
        started = time.perf_counter()
        out = super()._prepare_inputs(inputs)
        self.prepared += time.perf_counter() - started
        return out


class Clock(TrainerCallback):
    def __init__(self):
        self.trainer = None
        self.steps = []

    def on_step_begin(self, *args, **kwargs):
        self.trainer.sampling = self.trainer.prepared = 0.0
        self.trainer.lengths = []
        self.started = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        step = time.perf_counter() - self.started
        self.steps.append(
            {
                "sampling": self.trainer.sampling,
                "update": step - self.trainer.prepared,
                "step": step,
                "lengths": self.trainer.lengths,
            }
        )


def continuous(size: Size) -> dict:
    """Continuous batching with a cache for all sequences at their longest; by itself it takes 0.6 of the memory."""
    pages = -(-size.length // PAGE)
    config = {"page_size": PAGE, "num_blocks": size.sequences * pages, "max_batch_tokens": FORWARD}
    return {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": config}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--sampling", choices=["static", "continuous"], default="static")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    size = SIZES[args.size]
    model = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype="float32")
    rows = [json.loads(line) for line in open(args.folder / "prompts.jsonl", encoding="utf-8")]
    clock = Clock()
    trainer = Timed(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(args.folder / "model"),
        reward_funcs=has_seven,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=str(args.folder / "trl"),
            per_device_train_batch_size=size.sequences,
            num_generations=size.completions,
            max_completion_length=size.new_tokens,
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            max_steps=args.steps,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=10_000,
            disable_tqdm=True,
            **(continuous(size) if args.sampling == "continuous" else {}),
        ),
    )
    clock.trainer = trainer
    trainer.train()
    args.output.write_text(json.dumps(clock.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
