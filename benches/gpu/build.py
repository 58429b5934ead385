"""Where the programs are: in `bin/` of an unpacked archive, or built from the repository."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Names of what is built, by the kind of its target.
PROGRAMS = {"bin": ["firebrick"], "test": ["suite"], "bench": ["rates", "techniques", "kernels", "launches"]}


def wanted() -> list[tuple[str, str]]:
    """Kind and name of every program."""
    return [(kind, name) for kind, names in PROGRAMS.items() for name in names]


def build(features: str) -> dict[str, Path]:
    """Builds everything with these features (none: the CPU alone); paths by name."""
    command = ["cargo", "build", "--release", "--workspace", "--no-default-features"]
    command += ["--message-format=json-render-diagnostics"]
    if features:
        command += ["--features", features]
    for kind, name in wanted():
        command += [f"--{kind}", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with exit status {done.returncode}")
    found: dict[str, Path] = {}
    for line in done.stdout.splitlines():
        message = json.loads(line)
        target = message.get("target", {})
        for kind, name in wanted():
            if message.get("executable") and name == target["name"] and kind in target["kind"]:
                found[name] = Path(message["executable"])
    if missing := [name for _, name in wanted() if name not in found]:
        sys.exit(f"cargo built no {', '.join(missing)}")
    return found


def programs(features: str) -> dict[str, Path]:
    """What there is to run."""
    packed = ROOT / "bin"
    if not packed.is_dir():
        if not (ROOT / "Cargo.lock").exists():
            sys.exit(f"{packed} is missing: unpack the archive that benches/gpu/pack makes, whole")
        return build(features)
    found = {name: packed / name for names in PROGRAMS.values() for name in names if (packed / name).exists()}
    if "firebrick" not in found:
        sys.exit(f"{packed / 'firebrick'} is missing: unpack the archive that benches/gpu/pack makes, whole")
    if not all(os.access(path, os.X_OK) for path in found.values()):
        sys.exit(f"the programs in {packed} cannot be run: chmod +x {packed}/*")
    return found
