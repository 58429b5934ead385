"""Check a checkpoint written by Firebrick with Hugging Face transformers.

    python check_export.py EXPORTED
    python check_export.py EXPORTED --reference ORIGINAL
    python check_export.py EXPORTED --inputs rows.jsonl --logprobs out.jsonl [--temperature 0.7]

Always: the folder loads without missing or unexpected tensors, logits are
finite, and the tokenizer gives sentences back unchanged.

With --reference: tensor names, dtypes and shapes are the same, logits differ
by no more than --tolerance, and the tokenizers and chat templates agree. Both
models compute in float32, whatever their weights are stored in.

With --inputs and --logprobs: the output of `firebrick logprobs` is compared
with what transformers computes, row by row, unpadded. For a line
{"prompt", "completion"} the ids are those of the prompt with special tokens
followed by those of the completion without.

Exit status: 0 if every check passed, 1 if one failed, 2 for a usage error.
"""

import argparse
import copy
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

SENTENCES = [
    "Natalia sold clips to 48 of her friends in April.",
    "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18",
    "  two leading spaces, a tab\t, and 1,234,567.89 numbers  ",
    "Ça coûte 3 € – naïve café, 東京, Привет, 🙂!",
    "def f(x):\n    return x ** 2\n\n",
]
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]


class Report:
    def __init__(self):
        self.failed = 0

    def check(self, passed, text):
        print(f"{'ok  ' if passed else 'FAIL'}  {text}")
        self.failed += not passed
        return passed


def tensors(folder):
    """name -> (dtype, shape), from the headers of every shard."""
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"] if index.exists() else None
    files = sorted(set(listed.values())) if listed else ["model.safetensors"]
    out, where = {}, {}
    for file in files:
        with safe_open(folder / file, framework="pt") as shard:
            for name in shard.keys():
                part = shard.get_slice(name)
                out[name] = (part.get_dtype(), tuple(part.get_shape()))
                where[name] = file
    return out, listed is None or listed == where


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), {key: value for key, value in info.items() if value}


@torch.no_grad()
def logits(model, ids):
    parameters = getattr(model.config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "dynamic":
        model = copy.deepcopy(model)  # this kind remembers the longest sequence it has seen
    return model(input_ids=torch.tensor([ids])).logits[0]


def random_rows(vocab, count, length, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(2, length - 7 * row) for row in range(count)]
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def ids_of(line, tokenizer):
    if "input_ids" in line:
        return line["input_ids"]
    return tokenizer(line["prompt"])["input_ids"] + tokenizer(line["completion"], add_special_tokens=False)["input_ids"]


def check_tensors(report, exported, reference):
    mine, mine_index = tensors(exported)
    theirs, _ = tensors(reference)
    report.check(mine_index, "index file and shards list the same tensors")
    missing, extra = sorted(theirs.keys() - mine.keys()), sorted(mine.keys() - theirs.keys())
    report.check(not missing and not extra, f"tensor names: {len(mine)}, missing {missing}, extra {extra}")
    for position, what in enumerate(("dtypes", "shapes")):
        wrong = {
            name: f"{mine[name][position]}, reference {theirs[name][position]}"
            for name in sorted(mine.keys() & theirs.keys())
            if mine[name][position] != theirs[name][position]
        }
        report.check(not wrong, f"tensor {what}: " + (str(wrong) if wrong else "the same"))


def check_logprobs(report, model, tokenizer, args):
    lines, results = read_jsonl(args.inputs), read_jsonl(args.logprobs)
    if not report.check(len(lines) == len(results), f"{len(lines)} input lines, {len(results)} output lines"):
        return
    worst = {"logprobs": 0.0, "entropy": 0.0}
    for number, (line, result) in enumerate(zip(lines, results), start=1):
        ids = ids_of(line, tokenizer)
        logp = torch.log_softmax(logits(model, ids).double() / args.temperature, dim=-1)
        expected = {
            "logprobs": logp[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0],
            "entropy": -(logp.exp() * logp).sum(-1),
        }
        for key, value in expected.items():
            if len(result[key]) != len(value):
                report.check(False, f"line {number}: {len(result[key])} {key}, expected {len(value)}")
                continue
            got = torch.tensor(result[key], dtype=torch.float64)
            if not torch.isfinite(got).all():
                report.check(False, f"line {number}: {key} not finite")
            elif len(value):
                worst[key] = max(worst[key], (got - value).abs().max().item())
    for key, value in worst.items():
        report.check(value <= args.logprob_tolerance, f"{key}: max difference {value:.3g} over {len(lines)} lines")


def check_tokenizer(report, tokenizer, reference):
    for sentence in SENTENCES:
        ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        same = reference is None or tokenizer(sentence)["input_ids"] == reference(sentence)["input_ids"]
        report.check(back == sentence, f"round trip of {sentence!r}" + ("" if back == sentence else f": {back!r}"))
        if not same:
            report.check(False, f"ids of {sentence!r} differ from the reference tokenizer's")
    if reference is not None:
        templates = [t.chat_template for t in (tokenizer, reference)]
        rendered = [
            t.apply_chat_template(MESSAGES, tokenize=False) if t.chat_template else None for t in (tokenizer, reference)
        ]
        report.check(rendered[0] == rendered[1], "chat template" + (" (none)" if templates == [None, None] else ""))
        special = [(t.bos_token_id, t.eos_token_id, t.pad_token_id) for t in (tokenizer, reference)]
        report.check(special[0] == special[1], f"bos, eos, pad ids {special[0]}, reference {special[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exported", type=Path, help="checkpoint folder written by Firebrick")
    parser.add_argument("--reference", type=Path, help="checkpoint folder it should equal")
    parser.add_argument("--inputs", type=Path, help="the --input file of `firebrick logprobs`")
    parser.add_argument("--logprobs", type=Path, help="the --output file of `firebrick logprobs`")
    parser.add_argument("--temperature", type=float, default=1.0, help="as given to `firebrick logprobs` (default 1)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="on logits (default 1e-5)")
    parser.add_argument("--logprob-tolerance", type=float, default=1e-4, help="on log-probs and entropy (default 1e-4)")
    parser.add_argument("--rows", type=int, default=4, help="random token rows to compare (default 4)")
    parser.add_argument("--length", type=int, default=48, help="tokens in the longest row (default 48)")
    parser.add_argument("--seed", type=int, default=0, help="of the random rows (default 0)")
    args = parser.parse_args()
    if (args.inputs is None) != (args.logprobs is None):
        parser.error("--inputs and --logprobs go together")
    for path in (args.exported, args.reference):
        if path is not None and not (path / "config.json").is_file():
            parser.error(f"{path} has no config.json")
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()

    report = Report()
    model, problems = load(args.exported)
    report.check(not problems, f"loads as {type(model).__name__}" + (f": {problems}" if problems else ""))
    tokenizer = AutoTokenizer.from_pretrained(args.exported)
    rows = random_rows(model.config.vocab_size, args.rows, args.length, args.seed)
    mine = [logits(model, row) for row in rows]
    report.check(all(torch.isfinite(row).all() for row in mine), f"logits of {len(rows)} rows are finite")

    reference_tokenizer = None
    if args.reference is not None:
        check_tensors(report, args.exported, args.reference)
        reference, _ = load(args.reference)
        theirs = [logits(reference, row) for row in rows]
        if report.check(mine[0].shape == theirs[0].shape, f"vocabulary of {mine[0].shape[-1]}"):
            worst = max((a - b).abs().max().item() for a, b in zip(mine, theirs))
            report.check(worst <= args.tolerance, f"logits: max difference {worst:.3g} (tolerance {args.tolerance:g})")
        reference_tokenizer = AutoTokenizer.from_pretrained(args.reference)

    if args.logprobs is not None:
        check_logprobs(report, model, tokenizer, args)
    check_tokenizer(report, tokenizer, reference_tokenizer)
    print(f"{report.failed} failed" if report.failed else "all passed")
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
