"""Check a LoRA adapter that Firebrick wrote, with PEFT.

    python check_adapter.py BASE ADAPTER [--merged DIR]
                            [--inputs FILE --logprobs FILE [--temperature T]]

Always: the adapter loads onto BASE without a missing or unexpected key, and changes its logits.
With --merged: the merged model's logits equal those of PEFT's own merge and of the unmerged adapter.
With --inputs and --logprobs (the input and output of `firebrick logprobs --adapter`): its log-probs equal PEFT's.

Adapters of experts too, whether they are modules or parameters. Of a model with experts that are modules and with dense layers (Qwen 3
with `mlp_only_layers`) PEFT leaves out the dense layers' adapters with transformers 5, and the first check fails.

Exit code 0 if everything passes. Needs requirements.txt.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model, ids):
    return model(torch.tensor([ids])).logits[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="base model folder")
    parser.add_argument("adapter", type=Path, help="adapter folder written by Firebrick")
    parser.add_argument("--merged", type=Path, help="merged model folder written by Firebrick")
    parser.add_argument("--inputs", type=Path, help="the --input file of `firebrick logprobs`, with input_ids")
    parser.add_argument("--logprobs", type=Path, help="the --output file of `firebrick logprobs`")
    parser.add_argument("--temperature", type=float, default=1.0, help="as given to `firebrick logprobs` (default 1)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="on logits and log-probs (default 1e-4)")
    parser.add_argument("--seed", type=int, default=0, help="of the random row (default 0)")
    args = parser.parse_args()
    if (args.inputs is None) != (args.logprobs is None):
        parser.error("--inputs and --logprobs go together")

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()

    failed = 0

    def check(passed, what):
        nonlocal failed
        failed += not passed
        print(("ok    " if passed else "FAIL  ") + what)

    base = load(args.base)
    generator = torch.Generator().manual_seed(args.seed)
    row = torch.randint(base.config.vocab_size, (24,), generator=generator).tolist()
    plain = logits(base, row)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(base, args.adapter).eval()
    # PEFT warns of patterns of its own, too, where it turns modules of experts into parameters
    keys = [str(w.message) for w in caught if "missing" in str(w.message) or "unexpected keys" in str(w.message)]
    check(not keys, "adapter loads" + (f": {keys}" if keys else ""))
    beside = logits(adapted, row)
    check(not torch.equal(plain, beside), f"adapter changes logits by at most {(plain - beside).abs().max():.3g}")

    if args.logprobs is not None:
        inputs = [json.loads(line)["input_ids"] for line in args.inputs.read_text().splitlines()]
        outputs = [json.loads(line)["logprobs"] for line in args.logprobs.read_text().splitlines()]
        worst = 0.0
        for ids, found in zip(inputs, outputs, strict=True):
            scores = (logits(adapted, ids) / args.temperature).log_softmax(-1)[:-1]
            expected = scores.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
            worst = max([worst, *(expected - torch.tensor(found)).abs().tolist()])
        check(worst <= args.tolerance, f"log-probs of {len(inputs)} rows: max difference {worst:.3g}")

    if args.merged is not None:
        merged = logits(load(args.merged), row)
        for name, other in [("the adapter's", beside), ("PEFT's own merge's", logits(adapted.merge_and_unload(), row))]:
            worst = (merged - other).abs().max().item()
            check(worst <= args.tolerance, f"merged logits against {name}: max difference {worst:.3g}")

    print(f"{failed} failed" if failed else "all passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
