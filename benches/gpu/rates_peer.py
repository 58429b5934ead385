"""The cases of benches/rates/main.rs in PyTorch: reads its lines, writes the same ones with PyTorch's seconds.

    rates_peer.py RATES.jsonl --device cuda|cpu --output FILE
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Seconds that each number is measured for.
PATIENCE = 0.1
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class Bench:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work) -> float:
        """A run's, after two that do not count; several are in the queue at a time."""
        work()
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        one = time.perf_counter() - started
        batch = int(min(max(PATIENCE / 4 / max(one, 1e-6), 1), 100))
        started, runs = time.perf_counter(), 0
        while runs == 0 or time.perf_counter() - started < PATIENCE:
            for _ in range(batch):
                work()
            self.wait()
            runs += batch
        return (time.perf_counter() - started) / runs

    def shortest(self, before, work) -> float:
        """The fastest run on what `before` makes."""
        found = []
        for _ in range(6):
            made = before()
            self.wait()
            started = time.perf_counter()
            work(made)
            self.wait()
            found.append(time.perf_counter() - started)
        return min(found)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def product(self, case: dict) -> dict:
        dtype = DTYPES[case["dtype"]]
        rows, inner, outputs = case["rows"], case["inner"], case["outputs"]
        x, w = self.random(rows, inner, dtype=dtype), self.random(outputs, inner, dtype=dtype)
        if case["pass"] == "forward":
            seconds = self.seconds(lambda: x @ w.T)
        else:
            dy = self.random(rows, outputs, dtype=dtype)
            seconds = self.seconds((lambda: dy @ w) if case["pass"] == "inputs" else (lambda: dy.T @ x))
        return {"seconds": seconds, "tflops": 2 * rows * inner * outputs / seconds / 1e12}

    def attention(self, case: dict) -> dict:
        """By FlashAttention, and by cuDNN under `kernels`, where the device has them; by PyTorch's choice on a processor."""
        lengths = case["lengths"]
        if len(set(lengths)) > 1:
            # packed sequences: PyTorch's operation takes no heads of groups there
            return {}
        if self.device.type == "cpu":
            return self.attention_by(case, [])
        found = {"flash": self.attention_by(case, [SDPBackend.FLASH_ATTENTION]), "cudnn": self.attention_by(case, [SDPBackend.CUDNN_ATTENTION])}
        return found["flash"] | {"kernels": found}

    def attention_by(self, case: dict, backends: list) -> dict:
        dtype, count, length = DTYPES[case["dtype"]], len(case["lengths"]), case["lengths"][0]
        heads, dim = case["heads"], case["head_dim"]
        backward = case["pass"] == "backward"
        make = lambda h: self.random(count, h, length, dim, dtype=dtype).requires_grad_(backward)
        q, k, v = make(heads), make(case["kv_heads"]), make(case["kv_heads"])
        gradient = self.random(count, heads, length, dim, dtype=dtype)

        def forward() -> torch.Tensor:
            with sdpa_kernel(backends) if backends else nullcontext():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def both() -> None:
            torch.autograd.grad(forward(), (q, k, v), gradient)

        try:
            seconds = self.seconds(forward)
            if backward:
                seconds = max(self.seconds(both) - seconds, 1e-9)
        except RuntimeError as error:
            return {"error": str(error).splitlines()[0]}
        pairs = count * heads * length * (length + 1) / 2
        work = 4 * pairs * dim * (2.5 if backward else 1)
        return {"seconds": seconds, "tflops": work / seconds / 1e12}

    def copy(self, case: dict) -> dict:
        x = torch.ones(case["bytes"] // 4, device=self.device)
        seconds = self.seconds(lambda: x + 1.0)
        return {"seconds": seconds, "bytes_per_second": 2 * case["bytes"] / seconds}

    def link(self, case: dict) -> dict:
        host = torch.ones(case["bytes"] // 4).pin_memory()
        there = torch.ones(case["bytes"] // 4, device=self.device)
        if case["case"] == "host to device":
            seconds = self.shortest(lambda: host, lambda t: t.to(self.device, non_blocking=True))
        else:
            seconds = self.shortest(lambda: there, lambda t: host.copy_(t, non_blocking=True))
        return {"seconds": seconds, "bytes_per_second": case["bytes"] / seconds}

    def launch(self, _case: dict) -> dict:
        x = torch.ones(1, 8, device=self.device)

        def chain() -> None:
            y = x
            for _ in range(256):
                y = y + 1.0

        with torch.no_grad():
            return {"seconds": self.seconds(chain) / 256}

    def measure(self, case: dict) -> dict:
        kinds = {"host to device": self.link, "device to host": self.link, "device": None}
        known = kinds | {"product": self.product, "attention": self.attention, "copy": self.copy, "launch": self.launch}
        if not (work := known.get(case["case"])):
            return {}
        try:
            return work(case)
        except (RuntimeError, TypeError) as error:
            return {"error": str(error).splitlines()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    bench = Bench(torch.device(args.device))
    results = ("seconds", "tflops", "bytes_per_second", "of_best_square", "error", "kernels")
    with open(args.output, "w", encoding="utf-8") as output:
        for line in args.cases.read_text(encoding="utf-8").splitlines():
            case = {key: value for key, value in json.loads(line).items() if key not in results}
            if found := bench.measure(case):
                output.write(json.dumps(case | found) + "\n")
                output.flush()


if __name__ == "__main__":
    main()
