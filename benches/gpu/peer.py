"""One GRPO step in PyTorch and transformers, written as JSON; `run` beside this file starts it.

    peer.py JOB.json --device cuda|cpu --dtype bf16|f32 --output FILE

Sampling is `generate` with one static batch, attention by scaled_dot_product_attention. The update keeps all activations, or
recomputes layers (gradient checkpointing) where they do not fit. It takes micro-batches of as many sequences as Firebrick's at
most, the clipped loss over all tokens of the step, log-probs row by row as TRL takes them, clip by the global norm and AdamW.
In bf16 the optimizer keeps f32 masters of the weights and gradients are added up in f32, as FSDP and DeepSpeed do it. A short
warm-up does not count.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

CLIP = 0.2
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def build(arch: dict, dtype: torch.dtype, device: torch.device):
    settings = {key: value for key, value in arch.items() if key != "model_type"}
    config = AutoConfig.for_model(arch["model_type"], **settings)
    torch.manual_seed(0)
    with device:
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        except TypeError:  # transformers before 4.56
            model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype, attn_implementation="sdpa")
    return model


class Optimizer:
    """AdamW; beside weights in bf16 on f32 masters, whose gradients are added to as soon as each is complete."""

    def __init__(self, model, device: torch.device) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.half = self.weights[0].dtype != torch.float32
        self.masters = [w.detach().clone().float() for w in self.weights] if self.half else self.weights
        if self.half:
            for weight, master in zip(self.weights, self.masters):
                master.grad = torch.zeros_like(master)
                weight.register_post_accumulate_grad_hook(self.adding_to(master))
        self.adamw = torch.optim.AdamW(self.masters, lr=1e-6, weight_decay=0.0, fused=device.type == "cuda")

    @staticmethod
    def adding_to(master):
        def add(weight) -> None:
            master.grad.add_(weight.grad)
            weight.grad = None

        return add

    @torch.no_grad()
    def drop_gradients(self) -> None:
        for weight in self.weights:
            weight.grad = None
        for master in self.masters if self.half else []:
            master.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        if not self.half:
            self.adamw.zero_grad()
            return
        for weight, master in zip(self.weights, self.masters):
            weight.copy_(master)
            master.grad.zero_()


@torch.no_grad()
def sample(model, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    model.eval()
    # no end token, so that all completions have the same length, and the full distribution
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )
    sampled = model.generate(prompts, attention_mask=torch.ones_like(prompts))
    model.train()
    wanted = prompts.shape[1] + new_tokens
    if sampled.shape[1] != wanted:
        raise SystemExit(f"generate gave {sampled.shape[1]} tokens a sequence, {wanted} were asked for")
    return sampled


def advantages(sequences: torch.Tensor, n: int) -> torch.Tensor:
    """1 where a 7 stands in the last two digits, normalised by group."""
    rewards = [float("7" in str(last)[-2:]) for last in sequences[:, -1].tolist()]
    groups = [rewards[i : i + n] for i in range(0, len(rewards), n)]
    normal = [
        (reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4) for group in groups for reward in group
    ]
    return torch.tensor(normal, device=sequences.device)


def accumulate(model, sequences: torch.Tensor, advantage: torch.Tensor, new_tokens: int, micro_batch: int) -> None:
    """Gradients of the clipped loss, the mean over all tokens of the step."""
    total = sequences.shape[0] * new_tokens
    for ids, own in zip(sequences.split(micro_batch), advantage.split(micro_batch)):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=new_tokens + 1).logits[:, :-1]
        targets = ids[:, -new_tokens:]
        rows = zip(logits, targets)
        logp = torch.stack([row.log_softmax(-1).gather(-1, t[:, None]).squeeze(-1) for row, t in rows]).float()
        ratio = torch.exp(logp - logp.detach())
        own = own[:, None]
        loss = -torch.minimum(ratio * own, ratio.clamp(1 - CLIP, 1 + CLIP) * own).sum() / total
        loss.backward()


class Clock:
    """Seconds and peak bytes of what runs inside."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def __enter__(self) -> "Clock":
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.started = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.wait()
        self.seconds = time.perf_counter() - self.started
        self.allocated = torch.cuda.max_memory_allocated() if self.cuda else None
        self.reserved = torch.cuda.max_memory_reserved() if self.cuda else None

    def figures(self) -> dict:
        return {"seconds": self.seconds, "allocated_bytes": self.allocated, "reserved_bytes": self.reserved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    job = json.loads(args.job.read_text(encoding="utf-8"))
    sizes, device = job["sizes"], torch.device(args.device)
    new_tokens, n, micro = sizes["new_tokens"], sizes["n"], sizes["micro_batch"]

    model = build(job["arch"], DTYPES[args.dtype], device)
    optimizer = Optimizer(model, device)
    prompts = torch.tensor(job["prompts"], device=device).repeat_interleave(n, 0)

    warm = sample(model, prompts, min(8, new_tokens))
    accumulate(model, warm[:micro], advantages(warm, n)[:micro], min(8, new_tokens), micro)
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.empty_cache()

    found = {"parameters": sum(p.numel() for p in model.parameters())}

    def write() -> None:
        args.output.write_text(json.dumps(found), encoding="utf-8")

    with Clock(device) as clock:
        sequences = sample(model, prompts, new_tokens)
    found["sampling"] = clock.figures()
    write()
    update = lambda: accumulate(model, sequences, advantages(sequences, n), new_tokens, micro)
    recomputes = False
    with Clock(device) as clock:
        try:
            update()
        except torch.OutOfMemoryError:
            recomputes = True
        else:
            optimizer.step()
    if recomputes:
        optimizer.drop_gradients()
        torch.cuda.empty_cache()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with Clock(device) as clock:
            update()
            optimizer.step()
    found["update"] = clock.figures() | {"recomputes": recomputes}
    write()


if __name__ == "__main__":
    main()
