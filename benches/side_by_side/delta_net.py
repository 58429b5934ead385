"""transformers' gated DeltaNet (its PyTorch fallback) on the CPU, beside `cargo bench --bench linear_attention`: the shapes of
Qwen3.5-0.8B, f32.

    delta_net.py [--case mixer | rule | decoding] [--tokens 2048] [--repeats 5] [--threads N] [--loop]

`mixer` is a layer's norm, mixer and residual, forward and backward over one sequence; `rule` what is no projection of it (convolution,
delta rule, gated norm); `decoding` samples 64 new tokens of 16 sequences with prompts of 32 from a model of four layers. `--loop` takes
the way of earlier versions, which invert a chunk's system row by row, in place of a triangular solve. Needs torch and transformers 5
(requirements.txt), without fla and causal-conv1d. Prints JSON: seconds of each repeat and their median.
"""

import argparse
import json
import statistics
import time

import torch
import transformers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

WIDTH, HEADS, HEAD = 1024, 16, 128
CHANNELS = 3 * HEADS * HEAD
SEQUENCES, PROMPT, NEW = 16, 32, 64


def config(feed_forward):
    return Qwen3_5TextConfig(
        hidden_size=WIDTH,
        intermediate_size=feed_forward,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        vocab_size=64,
    )


def mixer(tokens):
    layer = modeling.Qwen3_5GatedDeltaNet(config(64), layer_idx=0).float()
    norm = modeling.Qwen3_5RMSNorm(WIDTH, eps=1e-6)
    x = torch.randn(1, tokens, WIDTH)

    def run():
        own = x.clone().requires_grad_(True)
        layer.zero_grad()
        y = own + layer(norm(own))
        (y * x).sum().backward()

    return run


def rule(tokens):
    norm = modeling.Qwen3_5RMSNormGated(HEAD, eps=1e-6)
    taps = torch.randn(CHANNELS, 4)
    inputs = [
        torch.randn(1, tokens, CHANNELS),
        torch.randn(tokens * HEADS, HEAD),
        -torch.randn(1, tokens, HEADS).abs(),
        torch.rand(1, tokens, HEADS),
        taps,
    ]

    def run():
        qkv, z, g, beta, w = (x.clone().requires_grad_(True) for x in inputs)
        norm.zero_grad()
        mixed = modeling.causal_conv1d_fn(qkv.transpose(1, 2), w, None, activation="silu").transpose(1, 2)
        parts = mixed.split(HEADS * HEAD, dim=-1)
        query, key, value = (part.reshape(1, tokens, HEADS, HEAD) for part in parts)
        y, _ = modeling.torch_chunk_gated_delta_rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        y = norm(y.reshape(-1, HEAD), z)
        (y * inputs[1]).sum().backward()

    return run


def decoding(_):
    model = Qwen3_5ForCausalLM(config(3584)).float().eval()
    prompts = torch.tensor([[(index * 7 + i * 13) % 64 for i in range(PROMPT)] for index in range(SEQUENCES)])

    @torch.inference_mode()
    def run():
        given = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0
        )
        assert given.shape == (SEQUENCES, PROMPT + NEW)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["mixer", "rule", "decoding"], default="mixer")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--loop", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.loop:
        modeling.is_torchdynamo_exporting = lambda: True
    torch.manual_seed(1)
    run = {"mixer": mixer, "rule": rule, "decoding": decoding}[args.case](args.tokens)
    seconds = []
    for repeat in range(args.repeats + 1):
        started = time.perf_counter()
        run()
        if repeat > 0:
            seconds.append(time.perf_counter() - started)
    print(json.dumps({
        "case": args.case,
        "tokens": SEQUENCES * NEW if args.case == "decoding" else args.tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "loop": args.loop,
        "seconds": seconds,
        "median": statistics.median(seconds),
    }))


if __name__ == "__main__":
    main()
