"""Figures as files that BENCHMARKS.md is made from: FOLDER/BENCH/DATE_MACHINE_COMMIT.json, as results.rs writes them.

FOLDER is --results of a script or FIREBRICK_RESULTS. FIREBRICK_MACHINE names the machine (otherwise its processor's or GPU's model does),
FIREBRICK_COMMIT the commit where there is no git.
"""

import datetime
import json
import os
import platform
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def add_argument(parser) -> None:
    folder = os.environ.get("FIREBRICK_RESULTS") or None
    parser.add_argument("--results", type=Path, metavar="FOLDER", default=folder, help="also write the figures below this folder (FIREBRICK_RESULTS)")


def slug(name: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def machine() -> str:
    try:
        model = re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        model = None
    return slug(model[1] if model else platform.machine())


def commit() -> str:
    if given := os.environ.get("FIREBRICK_COMMIT"):
        return given
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip() if asked.returncode == 0 else "unknown"


def significant(value: float | None, digits: int = 3) -> float | int | None:
    """A number with so many digits, and none of a whole part less."""
    if value is None:
        return None
    value = float(f"{value:.{digits}g}") if abs(value) < 10**digits else round(value)
    return int(value) if value == int(value) and abs(value) >= 10 ** (digits - 1) else value


def write(folder, bench: str, title: str, command: str, what: str, columns: list[str], rows: list[list], peer: str = "", machine_name: str = "") -> None:
    """Writes the file if there is a folder."""
    if not folder:
        return
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    name = os.environ.get("FIREBRICK_MACHINE") or machine_name or machine()
    head = {"bench": bench, "title": title, "date": date, "machine": name, "commit": commit(), "command": command}
    head |= ({"peer": peer} if peer else {}) | {"what": what}
    dump = lambda value: json.dumps(value, ensure_ascii=False)
    lines = [f"  {dump(key)}: {dump(value)}," for key, value in head.items()]
    lines += [f'  "columns": {dump(columns)},', '  "rows": [', ",\n".join(f"    {dump(row)}" for row in rows), "  ]"]
    path = Path(folder) / bench / f"{date}_{name}_{head['commit']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + "\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"wrote {path}")
