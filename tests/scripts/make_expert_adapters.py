"""Write adapters of experts in PEFT's format, and what PEFT computes with them.

    python tests/scripts/make_expert_adapters.py

Writes tests/fixtures/train/expert_adapters/CASE for each of CASES: `adapter_config.json` and `adapter_model.safetensors` with random A and
B, and `golden.safetensors` with the log-probs of the model's golden rows (right padded, as `logprobs_right` there), the mean negative
log-likelihood `loss` and `grad.NAME`, its gradient with respect to every tensor NAME of the adapter; all computed in float64.

Experts of Qwen 3 are modules of their own in transformers 4: the adapter has that layout, and PEFT turns it into parameters as it loads it
with transformers 5, so that gradients are turned back here. PEFT 0.21 then leaves out the dense layers of a model that has both, whose
modules have the same names: this script adds their adapters to the weights itself. Needs tests/scripts/requirements.txt.
"""

import json
import warnings
from pathlib import Path

import peft
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
OUT = FIXTURES / "train" / "expert_adapters"
RANK, ALPHA = 2, 6

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# name, model, use_rslora, target_modules, target_parameters
CASES = [
    ("qwen3-moe", "qwen3-moe", False, ["q_proj", "gate_proj", "up_proj", "down_proj"], None),
    ("qwen3_5-moe", "qwen3_5-moe", False, ["out_proj", "gate_proj", "down_proj"], [DOWN, GATE_UP]),
    ("qwen3_5-moe-gate-up", "qwen3_5-moe", True, [], [GATE_UP]),
    ("gpt-oss", "gpt-oss", False, ["k_proj", "o_proj"], [DOWN, GATE_UP]),
    ("gpt-oss-down", "gpt-oss", False, [], [DOWN]),
]


def linears(model, targets):
    """Shapes of A and B by name: of modules, and of experts as transformers 4 has them."""
    config = model.config.get_text_config()
    shapes = {}

    def add(module, out, width):
        shapes[f"base_model.model.{module}.lora_A.weight"] = [RANK, width]
        shapes[f"base_model.model.{module}.lora_B.weight"] = [out, RANK]

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rsplit(".", 1)[-1] in targets:
            add(name, module.out_features, module.in_features)
        if name.endswith(".experts") and config.model_type == "qwen3_moe":
            count, hidden, width = module.down_proj.shape
            for expert in range(count):
                for leaf, out, inner in [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)]:
                    if f"{leaf}_proj" in targets:
                        add(f"{name}.{expert}.{leaf}_proj", out, inner)
    return shapes


def parameters(model, targets):
    """The same beside parameters of all experts, as PEFT's `ParamWrapper` nests them."""
    shapes = {}
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        turned = module.is_transposed
        for target in targets or []:
            count, *sides = getattr(module, target.rsplit(".", 1)[-1]).shape
            width, out = sides if turned else sides[::-1]
            inner = target == GATE_UP and DOWN in targets
            path = f"base_model.model.{name}" + (".base_layer" if inner else "")
            shapes[f"{path}.lora_A.weight"] = [RANK * count, width]
            shapes[f"{path}.lora_B.weight"] = [out, RANK * count]
    return shapes


class Delta(torch.nn.Module):
    def __init__(self, a, b, scale):
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Parameter(a), torch.nn.Parameter(b), scale

    def forward(self, weight):
        return weight + self.scale * self.b @ self.a


def beside_dense(model, tensors, scale):
    """Adapters of the dense layers of a model with experts, which PEFT leaves out."""
    deltas = {}
    for name, module in model.named_modules():
        key = f"base_model.model.{name}.lora_A.weight"
        leaf = name.rsplit(".", 1)[-1]
        if key in tensors and leaf in ("gate_proj", "up_proj", "down_proj"):
            a, b = tensors[key].double(), tensors[key.replace("lora_A", "lora_B")].double()
            deltas[name] = Delta(a, b, scale)
    for name, delta in deltas.items():
        parametrize.register_parametrization(model.get_submodule(name), "weight", delta)
    return deltas


def apart(gradients, tensors, layer, count, width):
    """Gradients of the parameters that PEFT made of experts' modules, as those of the modules."""
    path = f"base_model.model.model.layers.{layer}.mlp.experts"
    a, b = gradients[f"{path}.base_layer.lora_A.weight"], gradients[f"{path}.base_layer.lora_B.weight"]
    a, b = a.reshape(count, 2 * RANK, -1), b.reshape(2 * width, 2 * RANK, count)
    down_a = gradients[f"{path}.lora_A.weight"].reshape(count, RANK, -1)
    down_b = gradients[f"{path}.lora_B.weight"].reshape(-1, RANK, count)
    own = {}
    for expert in range(count):
        for leaf, ranks, rows in [("gate", slice(0, RANK), slice(0, width)), ("up", slice(RANK, None), slice(width, None))]:
            own[f"{path}.{expert}.{leaf}_proj.lora_A.weight"] = a[expert, ranks]
            own[f"{path}.{expert}.{leaf}_proj.lora_B.weight"] = b[rows, ranks, expert]
        own[f"{path}.{expert}.down_proj.lora_A.weight"] = down_a[expert]
        own[f"{path}.{expert}.down_proj.lora_B.weight"] = down_b[:, :, expert]
    return own


def write(case, name, rslora, modules, params, seed):
    folder = OUT / case
    folder.mkdir(parents=True, exist_ok=True)
    path = FIXTURES / "models" / name
    # grouped products take no float64
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()
    shapes = linears(model, modules) | parameters(model, params)
    random = torch.Generator().manual_seed(seed)
    tensors = {key: 0.1 * torch.randn(shape, generator=random) for key, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": name,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": modules,
        "target_parameters": params,
        "task_type": "CAUSAL_LM",
        "use_rslora": rslora,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

    rows = load_file(path / "golden" / "forward.safetensors")
    ids, mask = rows["input_ids_right"], rows["attention_mask_right"]
    scale = ALPHA / (RANK**0.5 if rslora else RANK)
    turned = name == "qwen3-moe"
    deltas = beside_dense(model, tensors, scale) if turned else {}
    with warnings.catch_warnings():
        # PEFT names the adapters of dense layers that it leaves out
        warnings.simplefilter("ignore" if turned else "error", UserWarning)
        adapted = PeftModel.from_pretrained(model, folder, is_trainable=True).eval()
    for delta in deltas.values():
        delta.requires_grad_(True)
    logits = adapted(input_ids=ids, attention_mask=mask).logits
    scores = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    real = (mask[:, 1:] * mask[:, :-1]).bool()
    loss = -scores[real].mean()
    loss.backward()

    gradients = {}
    for key, value in adapted.named_parameters():
        if ".lora_" in key:
            assert value.dtype == torch.float64 and value.grad is not None, key
            gradients[key.replace(".default", "")] = value.grad
    if turned:
        config = model.config
        for layer in range(config.num_hidden_layers):
            if layer in config.mlp_only_layers:
                continue
            gradients |= apart(gradients, tensors, layer, config.num_experts, config.moe_intermediate_size)
        for key, delta in deltas.items():
            for matrix, value in [("A", delta.a), ("B", delta.b)]:
                gradients[f"base_model.model.{key}.lora_{matrix}.weight"] = value.grad
    missing = set(tensors) - set(gradients)
    assert not missing, sorted(missing)[:3]
    golden = {f"grad.{key}": gradients[key].float().contiguous() for key in tensors}
    for key in tensors:
        assert golden[f"grad.{key}"].shape == tensors[key].shape, key
    golden["logprobs"] = (scores * real).detach().float().contiguous()
    golden["loss"] = loss.detach().float().reshape(1)
    plain = torch.tensor(0.0) + (rows["logprobs_right"] - golden["logprobs"])[real].abs().max()
    versions = {p.__name__: p.__version__ for p in (torch, transformers, peft)}
    save_file(golden, folder / "golden.safetensors", metadata={"seed": str(seed)} | versions)
    print(f"{case}: loss {loss:.6f}, {len(tensors)} tensors, log-probs moved by at most {plain:.3f}")


def main():
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    for seed, case in enumerate(CASES):
        write(*case, seed)


if __name__ == "__main__":
    main()
