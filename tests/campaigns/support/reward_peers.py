"""What TRL's GRPOTrainer and verl's NaiveRewardManager say of completions by the functions of a file.

    python reward_peers.py trl|verl ROWS MODEL FUNCTIONS NAMES…

ROWS has a JSON object a line, with `prompt`, `completion` (as the engine is given it), `completion_ids`, and the columns of a dataset; a
line comes out for each, as {name: {"reward": …, "extra": …}}. Rewards are those of the engine's own objects: TRL's are 32-bit floats.
MODEL is a folder with a small model and its tokenizer.
"""

import asyncio
import importlib.util
import json
import math
import sys
import tempfile
from pathlib import Path


def by_trl(rows, model, file, names):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, report_to=[], use_cpu=True, bf16=False, num_generations=4, per_device_train_batch_size=4, max_steps=9,
        )
        functions = [getattr(module, name) for name in names]
        columns = [{key: value for key, value in row.items() if key not in ("completion", "completion_ids")} for row in rows]
        trainer = GRPOTrainer(model=model, reward_funcs=functions, args=config, train_dataset=Dataset.from_list(columns))
    prompts, completions, ids = ([row[key] for row in rows] for key in ("prompt", "completion", "completion_ids"))
    rewards = trainer._calculate_rewards(columns, prompts, completions, ids)
    logged = {name: list(values) for name, values in trainer._pending_extra_logs.items()}
    for at in range(len(rows)):
        extra = {name: values[at] for name, values in logged.items()}
        yield {
            name: {"reward": None if math.isnan(value) else value, "extra": extra}
            for name, value in zip(names, rewards[at].tolist(), strict=True)
        }


def by_verl(rows, model, file, names):
    import numpy
    import torch
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.trainer.ppo.reward import get_custom_reward_fn

    tokenizer = AutoTokenizer.from_pretrained(model)

    def objects(values):
        array = numpy.empty(len(values), dtype=object)
        array[:] = values
        return array

    def batch(row):
        ids = tokenizer.encode(row["completion"], add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == row["completion"], row["completion"]
        ids = ids or [tokenizer.eos_token_id]
        prompt, response = torch.tensor([[1, 2]]), torch.tensor([ids])
        mask = torch.ones(1, 2 + len(ids), dtype=torch.long)
        own = {key: objects([row[key]]) for key in ("data_source", "reward_model", "extra_info")}
        # verl's agent loop for one turn says so
        own["__num_turns__"] = numpy.array([2], dtype=numpy.int32)
        return DataProto.from_dict({"prompts": prompt, "responses": response, "attention_mask": mask}, non_tensors=own)

    async def judged(name, kwargs):
        section = {"path": str(file), "name": name, "reward_kwargs": kwargs}
        config = OmegaConf.create({"reward": {"custom_reward_function": section}})
        function = get_custom_reward_fn(config)
        manager = get_reward_manager_cls("naive")(config, tokenizer, function)
        return await asyncio.gather(*(manager.run_single(batch(row)) for row in rows))

    async def all_of():
        # one after the other, as a run has one function
        said = []
        for name in names:
            name, _, kwargs = name.partition("?")
            said.append(await judged(name, json.loads(kwargs or "{}")))
        return said

    from verl.utils.ray_utils import get_event_loop

    said = get_event_loop().run_until_complete(all_of())
    for at in range(len(rows)):
        line = {}
        for name, results in zip(names, said, strict=True):
            own = results[at]
            extra = {key: plain(value) for key, value in own["reward_extra_info"].items() if key != "score"}
            line[name.partition("?")[0]] = {"reward": float(own["reward_score"]), "extra": extra}
        yield line


def plain(value):
    return value.item() if hasattr(value, "item") else value


def main():
    who, rows, model, file, *names = sys.argv[1:]
    rows = [json.loads(line) for line in Path(rows).open(encoding="utf-8")]
    for line in (by_trl if who == "trl" else by_verl)(rows, model, Path(file), names):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
