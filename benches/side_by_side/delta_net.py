"""transformers' gated DeltaNet (its PyTorch fallback) forward and backward over one sequence on the CPU, beside `cargo bench --bench
linear_attention`: the shapes of Qwen3.5-0.8B, f32, with the layer's norm and residual.

    delta_net.py [--tokens 2048] [--repeats 5] [--threads N]

Needs torch and transformers 5 (requirements.txt), without fla and causal-conv1d. Prints JSON: seconds of each repeat and their median.
"""

import argparse
import json
import statistics
import time

import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5RMSNorm

WIDTH = 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    config = Qwen3_5TextConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        vocab_size=64,
    )
    layer = Qwen3_5GatedDeltaNet(config, layer_idx=0).float()
    norm = Qwen3_5RMSNorm(WIDTH, eps=config.rms_norm_eps)
    x = torch.randn(1, args.tokens, WIDTH)
    seconds = []
    for repeat in range(args.repeats + 1):
        own = x.clone().requires_grad_(True)
        layer.zero_grad()
        started = time.perf_counter()
        y = own + layer(norm(own))
        (y * x).sum().backward()
        if repeat > 0:
            seconds.append(time.perf_counter() - started)
    print(json.dumps({
        "tokens": args.tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": seconds,
        "median": statistics.median(seconds),
    }))


if __name__ == "__main__":
    main()
