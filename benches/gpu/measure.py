"""Processes under a time limit, and the memory that they take."""

import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# Lines of a process's output that a failure shows.
TAIL = 12


@dataclass
class Finished:
    """What became of a process."""

    status: int
    seconds: float
    timed_out: bool
    output: str
    peak_resident_bytes: int
    # What the driver said was in use beyond what was there before, at most; None without nvidia-smi.
    peak_driver_bytes: int | None

    @property
    def ok(self) -> bool:
        return self.status == 0 and not self.timed_out

    def why(self) -> str:
        """Why it failed, with the end of what it said."""
        reason = f"stopped after {self.seconds:.0f} s" if self.timed_out else f"exit status {self.status}"
        lines = [line for line in self.output.strip().splitlines() if line.strip()]
        return "; ".join([reason, *lines[-TAIL:]])


class DriverMemory:
    """Bytes in use on the first visible GPU, as nvidia-smi reads them five times a second."""

    def __init__(self) -> None:
        self.before = self.most = 0
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> "DriverMemory":
        if not (tool := shutil.which("nvidia-smi")):
            return self
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        query = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
        try:
            once = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
            self.before = self.most = int(once.split()[0])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return self
        self.process = subprocess.Popen([*query, "--loop-ms=200"], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self.follow, args=(self.process.stdout,), daemon=True).start()
        return self

    def follow(self, lines) -> None:
        for line in lines:
            if line.strip().isdigit():
                self.most = max(self.most, int(line))

    def __exit__(self, *_) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def bytes(self) -> int | None:
        return (self.most - self.before) * 2**20 if self.process else None


def end(process: subprocess.Popen) -> None:
    """Ends a process and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run(command: list, limit: float, log: Path, env: dict[str, str] | None = None) -> Finished:
    """Runs a command for at most `limit` seconds; what it prints goes to `log`."""
    started = time.monotonic()
    timed_out = False
    with open(log, "wb") as output, DriverMemory() as driver:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                if time.monotonic() - started > limit and not timed_out:
                    timed_out = True
                    end(process)
                time.sleep(0.05)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if process.returncode is None:
                end(process)
        seconds = time.monotonic() - started
        peak = driver.bytes()
    return Finished(
        status=process.returncode,
        seconds=seconds,
        timed_out=timed_out,
        output=log.read_text(encoding="utf-8", errors="replace"),
        peak_resident_bytes=usage.ru_maxrss * 1024,
        peak_driver_bytes=peak,
    )
