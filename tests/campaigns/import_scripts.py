"""Launch scripts under bash, where programs only write down their arguments, beside what `firebrick import` reads of them.

    tests/campaigns/run import_scripts [FOLDER] [--only NAME …] [--program PROGRAM] [--all]

FOLDER has scripts (`*.sh`, folders within are searched too); without it they are those of tests/fixtures/import/scripts. Each runs
in a copy of its folder, with stand-ins on PATH for python, uv, ray, srun, torchrun, accelerate and what prepares a machine. A line
`# with: FILE …` in a script names files that are imported with it; `*.inc.sh` are only such. Of every setting that bash passes:

- `same`: the import has the value;
- `open`: the import lists it as one that only a run decides, or names a file that may have it and that is not given;
- `wrong`: the import has another value, `lost`: it has none, `extra`: it has a setting that bash does not pass.

The last three are failures. Scripts that start nothing, or are refused as two runs, are counted apart; --all names them.
"""

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests/fixtures/import/scripts"
NAMES = """python python3 uv ray srun torchrun accelerate deepspeed trl sbatch ssh scontrol pip pip3 conda wget curl git nvidia-smi npu-smi
huggingface-cli hf sleep docker apptainer mpirun sudo apt-get apt module hostname ifconfig wandb rocm-smi""".split()

# Writes down its arguments; a program that starts another starts it.
STAND_IN = '''#!{python}
import json, os, sys
name, rest = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(os.environ["RECORD"], "a") as out:
    out.write(json.dumps([name] + rest) + "\\n")
if name in ("srun", "sbatch", "ray", "uv", "ssh", "docker", "apptainer", "mpirun", "sudo"):
    for at, word in enumerate(rest):
        if os.path.basename(word) in ("bash", "sh"):
            os.execvp(word, rest[at:])
    if name in ("sbatch", "ssh") and rest:
        os.execvp("bash", ["bash"] + rest[-1:] if name == "sbatch" else ["bash", "-c", rest[-1]])
# a machine with GPUs of NVIDIA's, on which no program prints
sys.exit(1 if "torch_npu" in " ".join(rest) or name in ("npu-smi", "scontrol", "rocm-smi") else 0)
'''

KEY = re.compile(r"^[+~]*([A-Za-z_][A-Za-z0-9_./@-]*)(?:=(.*))?$", re.S)


def passed(words):
    """Settings of a command: Hydra's, or a program's options."""
    hydra = {}
    for word in words:
        key = KEY.match(word)
        if key and (key[2] is not None or word.startswith("~")):
            hydra[key[1]] = key[2] or ""
    if any("." in key for key in hydra):
        return hydra
    if not any(re.search(r"trl|grpo|rloo|ppo", word) for word in words if not word.startswith("--")) or "vllm-serve" in words:
        return {}
    flags, at = {}, 0
    while at < len(words):
        word, at = words[at], at + 1
        if not word.startswith("--"):
            continue
        if "=" in word:
            key, value = word[2:].split("=", 1)
            flags[key.replace("-", "_")] = value
            continue
        values = []
        while at < len(words) and not words[at].startswith("-") and not words[at].endswith(".py"):
            values.append(words[at])
            at += 1
        flags[word[2:].replace("-", "_")] = values[0] if len(values) == 1 else values or "true"
    return flags


def plain(value):
    """A value, however it is written."""
    if isinstance(value, list):
        return "[" + ",".join(plain(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{plain(item)}" for key, item in value.items()) + "}"
    text = json.dumps(value) if not isinstance(value, str) else value
    text = re.sub(r"[\s'\"\\]", "", text)
    if text.lower() in ("null", "none", ""):
        return ""
    if text.lower() in ("true", "false"):
        return text.lower()
    try:
        return repr(float(text.replace("_", "")))
    except ValueError:
        pass
    if text.startswith("["):
        return "[" + ",".join(plain(part) for part in text.strip("[]").split(",")) + "]"
    return text


def under_bash(script, folder, bin_folder):
    record = folder / ".record"
    record.touch()
    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": "/srv", "RECORD": str(record), "LANG": "C.UTF-8"}
    try:
        subprocess.run(["bash", str(script)], cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    runs = [passed(json.loads(line)[1:]) for line in record.read_text().splitlines()]
    record.unlink()
    runs = [run for run in runs if run]
    hydra = [run for run in runs if any("." in key for key in run)]
    return hydra or runs


def imported(program, script, folder, others):
    env = {"PATH": "/usr/bin:/bin", "HOME": "/srv", "PWD": str(folder), "LANG": "C.UTF-8"}
    words = [program, "import", str(script), *others, "--json"]
    said = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    if not said.stdout:
        return None, said.stderr.strip()
    return json.loads(said.stdout), ""


def compare(runs, account):
    """Kinds of a script's settings."""
    found = collections.defaultdict(list)
    rows = {row["key"]: row for row in account["rows"]}
    absent = any(row["outcome"] == "cannot" and "not among the files" in row["why"] for row in rows.values())
    keys = {key for run in runs for key in run}
    for key in sorted(keys):
        values = {plain(run[key]) for run in runs if key in run} | ({None} if any(key not in run for run in runs) else set())
        row = rows.get(key)
        if row is None:
            whole = any(own.startswith(key + ".") for own in rows)
            whole = whole and all(value and value.startswith("{") for value in values)
            found["same" if whole else "open" if absent else "lost"].append((key, values))
        elif row["open"]:
            found["open"].append((key, values))
        elif values == {plain(row["value"])}:
            found["same"].append((key, values))
        else:
            found["wrong"].append((key, values, row["value"]))
    for key, row in rows.items():
        if key.startswith(("(", "--config-")):  # the program, and the file that settings come from
            continue
        inner = any(key.startswith(own + ".") for own in keys)
        if key not in keys and not row["open"] and not inner and not absent:
            found["extra"].append((key, row["value"]))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=SCRIPTS)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--program", default=str(ROOT / "target/release/firebrick"))
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    totals, failed, apart = collections.Counter(), 0, collections.Counter()
    with tempfile.TemporaryDirectory() as scratch:
        bin_folder = Path(scratch) / "bin"
        bin_folder.mkdir()
        for name in NAMES:
            (bin_folder / name).write_text(STAND_IN.replace("{python}", sys.executable))
            (bin_folder / name).chmod(0o755)
        scripts = [path for path in sorted(args.folder.rglob("*.sh")) if not path.name.endswith(".inc.sh")]
        for path in scripts:
            if args.only and path.stem not in args.only:
                continue
            folder = Path(scratch) / "work"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for own in path.parent.glob("*.sh"):
                shutil.copy(own, folder)
            script = folder / path.name
            others = [str(folder / name) for name in " ".join(re.findall(r"^# with: (.*)$", path.read_text(errors="replace"), re.M)).split()]
            account, refusal = imported(args.program, script, folder, others)
            runs = under_bash(script, folder, bin_folder)
            name = path.relative_to(args.folder)
            if account is None or not runs:
                what = "starts nothing" if not runs else "refused"
                apart[what] += 1
                if args.all or "panicked" in refusal:
                    print(f"{name}: {what}: {refusal}")
                failed += "panicked" in refusal
                continue
            found = compare(runs, account)
            totals.update({kind: len(own) for kind, own in found.items()})
            bad = [(kind, own) for kind in ("wrong", "lost", "extra") for own in found[kind]]
            failed += bool(bad)
            for kind, own in bad:
                print(f"{name}: {kind}: {own}")
    print(f"settings: {dict(totals)}; scripts with a failure: {failed}; apart: {dict(apart)}")
    return 1 if failed or not totals else 0


if __name__ == "__main__":
    sys.exit(main())
