"""TRL's GRPOTrainer on the checkpoint and prompts of prepare.py: seconds of each step, written as JSON.

    peer.py FOLDER --steps N --output FILE

Every step samples 8 completions for each of 8 prompts and makes one update in f32, as fast as TRL does it on a CPU:
no recomputing, one batch, old log-probs from the update's own forward. `sampling` is what generation takes, `update`
is the step without generation, rewards and advantages.
"""

import argparse
import json
import time
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS = 8
COMPLETIONS = 8
NEW_TOKENS = 64


def has_seven(completions, **_):
    return [float("7" in text[-2:]) for text in completions]


class Timed(GRPOTrainer):
    sampling = 0.0
    prepared = 0.0

    def _generate_single_turn(self, *args, **kwargs):
        started = time.perf_counter()
        out = super()._generate_single_turn(*args, **kwargs)
        self.sampling += time.perf_counter() - started
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
        self.started = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        step = time.perf_counter() - self.started
        self.steps.append(
            {"sampling": self.trainer.sampling, "update": step - self.trainer.prepared, "step": step}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype="float32")
    model.generation_config.eos_token_id = 1
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
            per_device_train_batch_size=PROMPTS * COMPLETIONS,
            num_generations=COMPLETIONS,
            max_completion_length=NEW_TOKENS,
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
        ),
    )
    clock.trainer = trainer
    trainer.train()
    args.output.write_text(json.dumps(clock.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
