"""Run folders as a long training run leaves them, made from random numbers with a seed."""

import json
import math
import random
import re

MIB = 1 << 20
HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\u0000\u001b[31mred\u0007 \u202edesrever\u202c \u200f\u05d0\u05d1\u05d2 <!-- \u2028 &lt;b&gt;"
PHASES = {"gen": 4.1, "reward": 0.05, "old_log_prob": 1.2, "ref": 1.1, "adv": 0.01, "update_actor": 3.4}
ESTIMATES = {
    "rollout": {"parameters": 990, "kv_cache": 1400, "buffers": 120, "overhead": 310},
    "score": {"parameters": 990, "reference": 990, "attention": 180, "head": 300, "buffers": 140, "overhead": 310},
    "backward": {"parameters": 990, "gradients": 990, "moments": 500, "kept_inputs": 210, "live_graph": 420, "head": 340, "buffers": 90, "overhead": 310},
    "optimizer": {"parameters": 990, "gradients": 990, "moments": 500, "buffers": 60, "overhead": 310},
}
PHASE_ESTIMATES = {"gen": ["rollout"], "reward": ["reward"], "old_log_prob": ["score"], "ref": ["score"], "adv": [], "update_actor": ["backward", "optimizer"]}


# steps whose first group is kept with its tokens
TOKEN_STEPS = 8


def config(seed, lr):
    return f"""model: {{path: models/Qwen2.5-0.5B-Instruct}}
task: {{kind: jsonl, train: train.jsonl, answer: answer, rewards: [{{kind: number}}]}}
output: runs/seed-{seed}
rollout: {{n: 8, prompt_length: 512, response_length: 1024}}
optim: {{lr: {lr}}}
trainer: {{steps: 1000, train_batch_size: 8, seed: {seed}, log_tokens: 1}}
memory: {{budget: 4GiB, snapshot: 2}}
"""


def estimates():
    whole = lambda of: {name: mib * MIB for name, mib in of.items()}
    return [{"name": name, "total_bytes": sum(whole(of).values()), "host_bytes": 0, "moment": f"the largest of {name}", "categories": whole(of)} for name, of in ESTIMATES.items()]


def metrics(chance, step, progress, lr):
    noise = lambda scale: chance.gauss(0, scale)
    reward = min(1, max(0, 0.18 + 0.62 * progress + noise(0.05)))
    row = {"training/global_step": step}
    if step % 25 == 0:
        row["val-core/jsonl/reward"] = min(1, max(0, 0.16 + 0.6 * progress + noise(0.012)))
    if step == 0:
        return row, reward
    row |= {
        "critic/score/mean": reward, "critic/score/max": 1.0, "critic/score/min": 0.0, "critic/rewards/mean": reward,
        "reward/number/mean": reward, "response_length/mean": 300 + 180 * progress + noise(12),
        "response_length/clip_ratio": max(0, 0.22 * math.exp(-4 * progress) + noise(0.012)),
        "frac_reward_zero_std": min(1, max(0, 0.25 + 0.35 * progress + noise(0.06))),
        "actor/entropy": 0.25 + 1.1 * math.exp(-3 * progress) + noise(0.02), "actor/grad_norm": abs(0.4 + noise(0.1)),
        "actor/lr": lr, "actor/pg_loss": noise(0.02), "actor/ppo_kl": abs(noise(1e-4)), "actor/pg_clipfrac": abs(noise(2e-3)),
        "training/rollout_probs_diff_mean": 2e-5 * (1 + abs(noise(0.3))), "training/rollout_probs_diff_max": 0.004 * (1 + abs(noise(0.5))),
        "perf/total_num_tokens": 64 * (380 + 180 * progress), "perf/throughput": 2900 + noise(60),
        "perf/max_memory_allocated_gb": 3.3 + abs(noise(0.03)),
    }
    timings = {name: base * (0.9 + 0.35 * progress) * (1 + abs(noise(0.05))) for name, base in PHASES.items()}
    row |= {f"timing_s/{name}": value for name, value in timings.items()}
    row["timing_s/step"] = sum(timings.values())
    for extra in range(80 - len(row)):
        row[f"batch/extra_{extra:02}"] = 100 * extra + noise(3)
    return row, reward


def sample(chance, step, draw, at, reward):
    a, b = draw % 97 + 3, draw % 41 + 7
    right = chance.random() < reward
    cut = chance.random() < 0.2 * math.exp(-step / 250)
    answer = a * b if right else a * b + chance.choice([-10, -1, 1, 2, 10])
    text = f"There are {a} boxes with {b} pens each.\nSo there are {a} × {b} = {answer} pens.\n" * chance.randint(1, 4)
    text = text + "Let me check this once more: " * 20 if cut else text + f"#### {answer}"
    return {
        "step": step, "draw": draw, "sample": at, "prompt": f"A shop has {a} boxes. Each box holds {b} pens. How many pens are in the shop?",
        "completion": text, "answer": str(a * b), "reward": float(right and not cut), "reward_parts": [["number", float(right and not cut)]],
        "advantage": chance.gauss(0, 1), "finish": "length" if cut else "stop", "tokens": 1024 if cut else 40 + len(text) // 4,
    }


def tokens(chance, line):
    """A line of tokens.jsonl for one of samples.jsonl: words as tokens, the end of sequence as the last."""
    pieces = re.findall(r"\s?\w{1,12}|[^\w]", line["completion"][:20_000]) + ["<|im_end|>"]
    sampler = [min(-1e-4, math.log(chance.betavariate(4, 0.6) * 10 ** chance.choice([0, 0, 0, -0.5, -1, -2]))) for _ in pieces]
    trainer = [logp + chance.gauss(0, 10 ** chance.uniform(-5, -1)) for logp in sampler]
    slope = chance.choice([0, 0.01])
    return {
        "step": line["step"], "draw": line["draw"], "sample": line["sample"], "tokens": len(pieces), "pieces": pieces,
        "sampler_logp": [round(logp, 6) for logp in sampler], "trainer_logp": [round(logp, 6) for logp in trainer],
        "mismatch": [round(math.exp(b) - math.exp(a), 8) for a, b in zip(sampler, trainer)],
        "advantage": [round(line["advantage"] - slope * at, 6) for at in range(len(pieces))],
        "mask": [int(at % 11 != 10 or line["sample"] % 2 == 0) for at in range(len(pieces))],
    }


def memory(chance, step):
    for phase, names in PHASE_ESTIMATES.items():
        of = ESTIMATES.get(names[0]) if names else {"parameters": 990}
        held = {name: int(mib * MIB * chance.uniform(0.86, 0.97)) for name, mib in (of or {"parameters": 990}).items() if name != "overhead"}
        accounts = [{"category": name, "home": "device", "bytes": 0, "peak_bytes": held_bytes} for name, held_bytes in held.items()]
        used = sum(held.values())
        yield {"step": step, "phase": phase, "source": "counted_heap", "in_use_bytes": used // 3, "reserved_bytes": used // 3,
               "peak_bytes": used + 200 * MIB, "accounts": accounts}


def peaks(steps, phases, in_use):
    """The most in use since each phase began, and a little between boundaries."""
    most, last, found = 0, None, []
    for key, used in zip(zip(steps, phases), in_use):
        most = used + 40 * MIB if key != last else max(most, used + 40 * MIB)
        last = key
        found.append(most)
    return found


def timeline(chance):
    phases, places = list(PHASE_ESTIMATES), ["begin", "sample", "forward", "head", "graph", "backward", "embedding", "update", "out_of_memory", "replanned", "end"]
    rows, held = [], {"parameters": 990, "reference": 990, "moments": 500, "kv_cache": 0, "kept_inputs": 0, "live_graph": 0, "gradients": 0}

    def row(step, phase, place, segment, time, **now):
        held.update(now)
        rows.append((step, phases.index(phase), places.index(place), segment, time, dict(held)))

    for step in (1, 2):
        time = 0.0
        row(step, "gen", "begin", None, time)
        for at in range(12):
            time += 0.3
            row(step, "gen", "sample", None, time, kv_cache=1400 - 90 * at)
        row(step, "gen", "end", None, time + 0.3, kv_cache=0)
        for phase in ("old_log_prob", "ref"):
            for segment in range(24):
                time += 0.04
                row(step, phase, "forward", segment, time)
            row(step, phase, "end", None, time)
        for _ in range(3):
            for segment in range(24):
                time += 0.03
                row(step, "update_actor", "forward", segment, time, kept_inputs=8 * (segment + 1))
            for segment in reversed(range(24)):
                time += 0.06
                row(step, "update_actor", "graph", segment, time, live_graph=380)
                row(step, "update_actor", "backward", segment, time + 0.02, live_graph=0, kept_inputs=8 * segment, gradients=max(held["gradients"], 990 * (24 - segment) // 24))
        for unit in range(24):
            time += 0.02
            row(step, "update_actor", "update", unit, time)
        row(step, "update_actor", "end", None, time, gradients=0)
    in_use = [(sum(held.values()) + 60) * MIB + chance.randint(0, 8 * MIB) for *_, held in rows]
    columns = list(zip(*rows))
    account = lambda name: {"category": name, "home": "device", "model": "reference" if name == "reference" else "policy", "bytes": [own[name] * MIB for own in columns[5]]}
    return {
        "format": "firebrick.memory_timeline", "version": 1, "reason": "snapshot", "error": None, "device": "cpu (synthetic)", "unified": True,
        "dropped": 0, "phases": [{"name": name, "estimates": names} for name, names in PHASE_ESTIMATES.items()], "places": places,
        "boundaries": {"step": columns[0], "phase": columns[1], "place": columns[2], "segment": columns[3], "seconds": columns[4],
                       "in_use_bytes": in_use, "peak_bytes": peaks(columns[0], columns[1], in_use), "reserved_bytes": in_use},
        "accounts": [account(name) for name in held], "plans": [{"from": 0, "phases": estimates()}], "trace": None,
    }


def plan():
    peak = max(phase["total_bytes"] for phase in estimates())
    return {
        "peak_bytes": peak, "host_peak_bytes": 210 * MIB, "budget_bytes": 4 << 30, "margin": 0.1, "phases": estimates(),
        "seconds": {"rollout": 3.9, "score": 2.1, "backward": 3.0, "optimizer": 0.2, "reward": 0.0, "values": 0.0, "critic_backward": 0.0, "critic_optimizer": 0.0},
        "batch": {}, "decisions": [
            {"what": "recompute every layer", "settings": "memory.gradient_checkpointing=true", "phase": "backward", "saves_bytes": 3100 * MIB, "costs_seconds": 0.9},
            {"what": "8-bit moments", "settings": "memory.moments=block8", "phase": "backward", "saves_bytes": 1480 * MIB, "costs_seconds": 0.02},
            {"what": "the head in chunks", "settings": "memory.head_rows=256", "phase": "backward", "saves_bytes": 890 * MIB, "costs_seconds": 0.05}],
        "settings": ["memory.gradient_checkpointing=true", "memory.moments=block8", "memory.head_rows=256", "rollout.max_num_seqs=64"],
        "device": "cpu", "profile": "assumed",
    }


def write(folder, seed, steps, group_count, lr=1e-6, hostile=False):
    """Writes a run of `steps` steps with `group_count` groups of eight samples each."""
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config(seed, lr))
    with open(folder / "metrics.jsonl", "w") as scalars, open(folder / "samples.jsonl", "w") as samples, open(folder / "memory.jsonl", "w") as readings, open(folder / "tokens.jsonl", "w") as kept:
        print(json.dumps({"step": 0, "every": TOKEN_STEPS, "max_bytes": 64 * MIB}), file=kept)
        for step in range(steps + 1):
            progress = 1 - math.exp(-3 * step / steps * (1 + 0.04 * seed))
            row, reward = metrics(chance, step, progress, lr)
            print(json.dumps(row), file=scalars)
            if step == 0:
                continue
            for group in range(group_count):
                draw = (step - 1) * group_count + group
                ease = min(1, max(0, reward + chance.choice([-0.8, 0, 0, 0.4])))
                for at in range(8):
                    line = sample(chance, step, draw, at, ease)
                    if hostile and draw == 0 and at < 2:
                        line |= {"completion": HOSTILE if at == 0 else "x" * MIB + HOSTILE, "prompt": HOSTILE, "answer": "</script>1"}
                    print(json.dumps(line), file=samples)
                    if group == 0 and (step - 1) % TOKEN_STEPS == 0:
                        print(json.dumps(tokens(chance, line)), file=kept)
            for line in memory(chance, step):
                print(json.dumps(line), file=readings)
    (folder / "memory_timeline.json").write_text(json.dumps(timeline(chance)))
    (folder / "plan.json").write_text(json.dumps(plan()))
    by_phase = [{"phase": name, "predicted_bytes": own * MIB, "measured_bytes": int(own * MIB * 0.93)} for name, own in (("rollout", 2820), ("score", 2910), ("update", 3850))]
    (folder / "summary.json").write_text(json.dumps({
        "steps": steps, "seconds": 11000.0, "tokens_per_second": 2890.0, "first": {"val-core/jsonl/reward": 0.16}, "last": {"val-core/jsonl/reward": 0.75},
        "predicted_peak_bytes": plan()["peak_bytes"], "measured_peak_bytes": int(plan()["peak_bytes"] * 0.93), "memory": by_phase, "replans": 0,
        "peak_resident_bytes": None, "device": "cpu", "precision": "f32", "skipped_steps": 0}))
