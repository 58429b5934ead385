"""Where CUDA's compiler (NVRTC), cuBLASLt and headers are: in a toolkit, or in NVIDIA's packages, some of which PyTorch brings along."""

import json
import os
import subprocess
from pathlib import Path

# Where the program looks for a toolkit by itself when CUDA_PATH does not say.
USUAL = [Path("/usr/local/cuda"), Path("/opt/cuda")]
HEADERS = ["cuda_fp16.h", "crt/mma.h"]
LIBRARIES = ["libnvrtc.so*", "libcublasLt.so*"]
PACKAGES = "import json, nvidia; print(json.dumps(list(nvidia.__path__)))"


def packages(python: str) -> list[Path]:
    """Folders of NVIDIA's packages in an interpreter."""
    try:
        asked = subprocess.run([python, "-c", PACKAGES], capture_output=True, text=True, timeout=60)
        return [Path(folder) for folder in json.loads(asked.stdout)] if asked.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []


def linked(include: Path, others: list[Path]) -> bool:
    """One folder of all headers in NVIDIA's packages, which are in a folder a package; whether there are any."""
    found = [path for other in others if other.is_dir() for path in sorted(other.rglob("include")) if path.is_dir()]
    for header in (header for path in found for header in sorted(path.iterdir())):
        include.mkdir(parents=True, exist_ok=True)
        if not (include / header.name).exists():
            (include / header.name).symlink_to(header.resolve())
    return bool(found)


def environment(python: str, folder: Path) -> dict[str, str]:
    """What a program that compiles kernels needs in its environment beside what is there; `folder` is for links to headers.

    A toolkit that is whole is taken as it is. What is still missing then, the program says.
    """
    said = os.environ.get("CUDA_PATH")
    toolkits = [Path(said)] if said else [path for path in USUAL if path.is_dir()]
    others = packages(python)
    found: dict[str, str] = {}
    whole = any(all((path / "include" / header).exists() for header in HEADERS) for path in toolkits)
    if not whole and linked(folder / "include", others):
        found["CUDA_PATH"] = str(folder)
    # the loader does not look into a toolkit by itself
    folders = [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
    for library in LIBRARIES:
        places = [path / lib for path in toolkits for lib in ("lib64", "lib")]
        places += [path.parent for other in others if other.is_dir() for path in sorted(other.rglob(library))]
        folders += [str(path) for path in places if list(path.glob(library))][:1]
    if folders:
        found["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(folders))
    return found
