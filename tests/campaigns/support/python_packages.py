"""Virtual environments with packages of stated versions."""

import subprocess
import sys


def environment(folder, packages):
    """Makes a virtual environment with these packages, or takes one that is there; gives its Python."""
    python = folder / "bin/python"
    if not python.exists():
        print(f"        installing {' '.join(packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    names = [package.split("==")[0] for package in packages]
    found = subprocess.run([str(python), "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    versions = {line for line in found.splitlines() if line.split("==")[0].lower() in names}
    assert versions >= set(packages), f"{folder} has {sorted(versions)} instead of {packages}"
    return str(python)
