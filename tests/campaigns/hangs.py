"""Runs that hang, each made on purpose: all end in time with exit code 4, name phase and cause, and can continue.

    tests/campaigns/run hangs [--firebrick PROGRAM] [--only NAME ...] [--sample] [--limit 4] [--jobs 2]

PROGRAM is built with the feature `mpi`; cargo builds it where absent. Of each kind, a small run is started with `trainer.heartbeat_timeout`
of LIMIT seconds. What makes it hang is there from the start, or arrives once the run has a checkpoint. The run has to end within its limit
and some seconds for its report, with exit code 4; the message and `hang*.txt` have to name the phase and the cause; no process of the run
may be left. Then the cause is removed, and the run has to continue from its last checkpoint, or to start again where there is none. `--sample`
takes the kinds of the test suite, which need no MPI.
"""

import argparse
import ctypes
import fcntl
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/fixtures/models/qwen2-tied"
# seconds beyond the limit: the report's own timeouts
REPORT = 12.0
MARK = "FIREBRICK_HANG_CASE"
MPIRUN = ["mpirun", "--oversubscribe", "-n", "2"]
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_plm": "isolated",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0",
}
SUMS = """
model:
  arch: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
         max_position_embeddings: 32}
task: {kind: arithmetic, difficulty: 1, validation_size: 4}
output: run
device: cpu
rollout: {n: 2, prompt_length: 6, response_length: 4}
trainer: {steps: 100000, train_batch_size: 2, seed: 5, save_freq: 1, val_before_train: false, logger: [console]}
"""
ROWS = """
model: {path: MODEL, chat_template: template.jinja}
task:
  kind: dataset
  train: rows.jsonl
  rewards: [REWARD]
output: run
device: cpu
rollout: {n: 2, prompt_length: 200, response_length: 4}
trainer: {steps: 100000, train_batch_size: 2, seed: 5, save_freq: 1, val_before_train: false, logger: [console]}
"""
TEMPLATE = (
    "{%- for m in messages -%}{{ '\\n' + m.role + ': ' + m.content }}{%- if m.role == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '\\nassistant: ' }}{%- endif -%}"
)
# the bodies of what hangs, once the file `now` is there
PYTHON = '''
import fcntl, os, pathlib, signal, subprocess, time
here = pathlib.Path(__file__).parent

def armed():
    return (here / "now").exists()

class Environment:
    def reset(self, **row):
        HANG_RESET

    def add(self, amount: int) -> str:
        """Adds.

        Args:
            amount: How much.
        """
        return "added"

    def get_reward(self) -> float:
        HANG_REWARD
        return 1.0

def reward(completions, **kwargs):
    HANG_FUNCTION
    return [1.0] * len(completions)
'''
LOOP = "while armed(): pass"
SLEEP = "while armed(): time.sleep(0.1)"
STOP = "armed() and os.kill(os.getpid(), signal.SIGSTOP)"
TOOL = "armed() and subprocess.run(['sh', '-c', 'kill -s STOP $$'])"
FIFO = "armed() and open(here / 'fifo').read()"
LOCK = "armed() and fcntl.flock(open(here / 'lock', 'w'), fcntl.LOCK_EX)"
ON_RANK_1 = "while armed() and os.environ.get('OMPI_COMM_WORLD_RANK') == '1': time.sleep(0.1)"
# a judge of lines that falls silent
COMMAND = """import os, pathlib, sys, time, json
for line in sys.stdin:
    while pathlib.Path("now").exists(): time.sleep(0.1)
    print(json.dumps({"id": json.loads(line)["id"], "reward": 1.0}), flush=True)
"""
# one that stops to read, of requests that no pipe can hold
DEAF = COMMAND.replace("for line in sys.stdin:", "while line := (pathlib.Path('now').exists() and time.sleep(1e6)) or sys.stdin.readline():")


class Failed(Exception):
    pass


class Case:
    """A run in a folder."""

    def __init__(self, folder, firebrick, limit, ranks):
        self.folder, self.firebrick, self.limit, self.ranks = folder, firebrick, limit, ranks
        self.run, self.mark, self.settings, self.environment = folder / "run", uuid.uuid4().hex, [], {}
        self.cleanup = []
        (folder / "template.jinja").write_text(TEMPLATE)
        row = json.dumps({"prompt": [{"role": "user", "content": "ab"}], "hint": "b"})
        (folder / "rows.jsonl").write_text("\n".join([row] * 4) + "\n")

    def sums(self, *settings):
        (self.folder / "config.yaml").write_text(SUMS)
        self.settings += settings

    def rows(self, reward="{kind: length, target: 4}", *settings):
        text = ROWS.replace("MODEL", str(MODEL)).replace("REWARD", reward)
        (self.folder / "config.yaml").write_text(text)
        self.settings += settings

    def python(self, function="pass", reset="pass", reward="pass"):
        text = PYTHON.replace("HANG_FUNCTION", function).replace("HANG_RESET", reset).replace("HANG_REWARD", reward)
        (self.folder / "judge.py").write_text(text)

    def command(self, *more):
        own = [self.firebrick, "train", "config.yaml", *self.settings, *more]
        return [*MPIRUN, *own] if self.ranks else own

    def start(self, *more, stderr=None):
        environment = {**os.environ, **ENVIRONMENT, **self.environment, MARK: self.mark}
        with (self.folder / "said.txt").open("wb") as said:
            self.process = subprocess.Popen(
                self.command(*more), cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=stderr or said, stderr=stderr or said
            )

    def said(self):
        return (self.folder / "said.txt").read_text(errors="replace")

    def reports(self):
        return "\n".join(file.read_text(errors="replace") for file in sorted(self.run.glob("hang*.txt")))

    def last(self):
        steps = [int(path.name[5:]) for path in self.run.glob("checkpoints/step-*") if path.name[5:].isdigit()]
        return max(steps, default=0)

    def await_checkpoint(self, step=2):
        end = time.monotonic() + 120
        while self.last() < step:
            if self.process.poll() is not None:
                raise Failed(f"ended early with {self.process.returncode}: {self.said()}")
            if time.monotonic() > end:
                raise Failed("no checkpoint within two minutes")
            time.sleep(0.02)

    def processes(self):
        """Processes of the run, this one's children and theirs."""
        found, mark = [], f"{MARK}={self.mark}".encode()
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and mark in (process / "environ").read_bytes().split(b"\0"):
                    if (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                        found.append(int(process.name))
            except OSError:
                continue
        return sorted(found)

    def rank(self, number):
        for pid in self.processes():
            own = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if f"OMPI_COMM_WORLD_RANK={number}".encode() in own and name == Path(self.firebrick).name[:15]:
                return pid
        raise Failed(f"rank {number} does not run")

    def stop_thread(self, name=None, pid=None):
        """Stops one thread: the training thread, or one by its name."""
        pid = pid or self.process.pid
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_ulong, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p]
        tids = [pid]
        if name:
            tasks = Path(f"/proc/{pid}/task").iterdir()
            tids = [int(task.name) for task in tasks if (task / "comm").read_text().strip().startswith(name)]
        for tid in tids:
            if libc.ptrace(0x4206, tid, None, None) or libc.ptrace(0x4207, tid, None, None):
                raise Failed(f"a thread cannot be stopped: {os.strerror(ctypes.get_errno())}")
            os.waitpid(tid, 0x40000000)
        if not tids:
            raise Failed(f"there is no thread {name}")
        # ends of others are this tracer's to take before their parent's
        self.traced = [tid for tid in tids if tid != self.process.pid]

    def await_end(self, begun):
        """The exit code, which has to come in time."""
        while self.process.poll() is None:
            for tid in getattr(self, "traced", []):
                try:
                    os.waitpid(tid, 0x40000000 | os.WNOHANG)
                except ChildProcessError:
                    pass
            limits = [float(limit) for limit in re.findall(r"^limit: ([0-9.]+) s", self.reports(), re.M)]
            if time.monotonic() - begun > max([5 * self.limit, *limits]) + REPORT:
                raise Failed(f"still there after {time.monotonic() - begun:.0f} s; it said: {self.said()[-800:]}")
            time.sleep(0.05)
        return self.process.returncode

    def end(self):
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if hasattr(self, "process"):
            self.process.wait()
        for clean in self.cleanup:
            clean()


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def replaced(case, name):
    """A file of the run becomes a pipe that nobody reads, at once."""
    kept = case.run / f"{name}.kept"
    pipe = case.folder / "pipe"
    fifo(pipe)
    shutil.copy(case.run / name, kept)
    os.replace(pipe, case.run / name)
    case.heal = lambda: os.replace(kept, case.run / name)


JUDGE = "{kind: python, name: judge, file: judge.py, function: reward, workers: 1, timeout: 3600}"


def armed(body=None, **bodies):
    """A Python function or environment that hangs as soon as the file `now` is there."""

    def prepare(case):
        if bodies:
            case.rows("", "task.environment={kind: python, file: judge.py, class: Environment, workers: 1, timeout: 3600}")
        else:
            case.rows(JUDGE)
        case.python(**({"function": body} if body else bodies))
        fifo(case.folder / "fifo")
        lock = (case.folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        case.cleanup.append(lock.close)

    def arm(case):
        (case.folder / "now").touch()
        case.heal = (case.folder / "now").unlink

    return prepare, arm


def command(script):
    def prepare(case):
        (case.folder / "judge.py").write_text(script)
        case.rows("{kind: command, name: judge, command: [python3, -u, judge.py], folder: ., workers: 1, timeout: 3600}")
        if script == DEAF:
            # rows of 100 kB: a pipe has 64
            row = json.dumps({"prompt": [{"role": "user", "content": "ab"}], "hint": "b" * 100_000})
            (case.folder / "rows.jsonl").write_text("\n".join([row] * 4) + "\n")

    return prepare, armed("pass")[1]


def dataset(setting):
    """A pipe in place of a file of rows."""

    def prepare(case):
        case.rows()
        case.settings.append(f"task.{setting}=pipe.jsonl")
        fifo(case.folder / "pipe.jsonl")
        case.heal = lambda: (case.folder / "pipe.jsonl").unlink() or shutil.copy(case.folder / "rows.jsonl", case.folder / "pipe.jsonl")

    return prepare, None


def model(file):
    """A pipe in place of a file of the model."""

    def prepare(case):
        case.rows()
        folder = case.folder / "model"
        shutil.copytree(MODEL, folder)
        fifo(folder / file)
        case.settings.append("model.path=model")
        case.heal = lambda: (folder / file).unlink() or shutil.copy(MODEL / file, folder / file)

    return prepare, None


def hub(stalls_at):
    """A server of models that falls silent: at the list of files, or within a file."""

    class Stalls(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            if stalls_at == "list":
                time.sleep(1e6)
            if "/api/" in self.path:
                files = [{"rfilename": file.name, "size": file.stat().st_size} for file in sorted(MODEL.iterdir()) if file.is_file()]
                body = json.dumps({"sha": "0" * 40, "siblings": files}).encode()
            else:
                body = (MODEL / self.path.rsplit("/", 1)[1]).read_bytes()
            whole, begun, last = len(body), 0, len(body) - 1
            wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if wanted:
                begun, last = int(wanted[1]), int(wanted[2] or last)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(last + 1 - begun))
            self.send_header("Content-Range", f"bytes {begun}-{last}/{whole}")
            self.send_header("ETag", '"' + "1" * 40 + '"')
            self.send_header("x-repo-commit", "0" * 40)
            self.end_headers()
            if self.path.endswith("model.safetensors") and last > begun:
                self.wfile.write(body[begun : (begun + last) // 2])
                self.wfile.flush()
                time.sleep(1e6)
            self.wfile.write(body[begun : last + 1])

        def log_message(self, *args):
            pass

    def prepare(case):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stalls)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        case.cleanup.append(server.shutdown)
        case.rows()
        case.settings.append("model.path=someone/model")
        case.environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(case.folder / "cache")}
        case.heal = lambda: case.settings.remove("model.path=someone/model")

    return prepare, None


def full_pipe(case):
    """Nobody reads what the run says, and its pipe is full from the start."""
    case.sums()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while os.write(writer, b"." * 4096):
            pass
    except BlockingIOError:
        os.set_blocking(writer, True)
    case.stderr = writer
    case.cleanup += [lambda: os.close(reader), lambda: os.close(writer)]


def unwritable(case):
    """A pipe where a file is written aside."""
    case.sums("trainer.steps=2")
    case.run.mkdir()
    fifo(case.run / "summary.json.tmp")
    case.heal = (case.run / "summary.json.tmp").unlink


def damaged_state(case):
    """The run's own checkpoint lies on a file system that does not answer."""
    case.sums("trainer.steps=2")
    case.start()
    if case.process.wait() != 0:
        raise Failed(f"did not start: {case.said()}")
    case.settings.append("trainer.steps=3")
    case.more = ["--resume"]
    state = case.run / "checkpoints/step-000002/trainer/state.json"
    kept = case.folder / "state.json"
    shutil.move(state, kept)
    fifo(state)
    case.heal = lambda: os.replace(kept, state)


OFFLOAD = [
    "memory.gradient_checkpointing=true", "memory.activation_offload=true", "memory.param_offload=streamed", "memory.grad_offload=true",
    "memory.optimizer_offload=cpu",
]
# name: what is prepared, what is done once there is a checkpoint, and expressions of phase and cause
KINDS = {
    "a command that falls silent": (*command(COMMAND), ["`(gen|reward)`", "reward `judge`, process [0-9]+, to answer"]),
    "a command that does not read": (*command(DEAF), ["`(gen|reward)`", "reward `judge`, process [0-9]+, to read"]),
    "a Python reward in an endless loop": (*armed(LOOP), ["`(gen|reward)`", "reward `judge`, process [0-9]+", "judge`, running"]),
    "a Python reward that sleeps": (*armed(SLEEP), ["`(gen|reward)`", "reward `judge`, process [0-9]+", "judge`, sleeping"]),
    "a Python reward that is stopped": (*armed(STOP), ["`(gen|reward)`", "reward `judge`, process", "judge`, stopped by a signal"]),
    "a Python reward that waits for a stopped tool": (*armed(TOOL), ["`(gen|reward)`", "reward `judge`, process"]),
    "a Python reward that reads a pipe": (*armed(FIFO), ["`(gen|reward)`", "reward `judge`, process"]),
    "a Python reward that waits for a lock": (*armed(LOCK), ["`(gen|reward)`", "reward `judge`, process"]),
    "an environment whose reset loops": (*armed(reset=LOOP), ["`gen`", "environment `Environment`, process [0-9]+, to answer"]),
    "an environment that is stopped": (*armed(reset=STOP), ["`gen`", "environment `Environment`", "stopped by a signal"]),
    "an environment whose tool is stopped": (*armed(reset=TOOL), ["`gen`", "environment `Environment`, process"]),
    "an environment whose reward sleeps": (*armed(reward=SLEEP), ["`gen`", "environment `Environment`, process"]),
    "a pipe in place of rows": (*dataset("train"), ["`load`", "open of .*pipe.jsonl"]),
    "a pipe in place of validation rows": (*dataset("validation"), ["`load`", "open of .*pipe.jsonl"]),
    "a pipe in place of a model's configuration": (*model("config.json"), ["`load`", "open of .*config.json"]),
    "a pipe in place of a tokenizer": (*model("tokenizer.json"), ["`load`", "open of .*tokenizer.json"]),
    "a Hub that does not answer": (*hub("list"), ["`load`", "model someone/model of the Hub, http://127.0.0.1"]),
    "a Hub that stalls within a file": (*hub("file"), ["`load`", "model someone/model of the Hub, http://127.0.0.1"]),
    "a full pipe of messages": (full_pipe, None, ["`(load|report|gen)`", "write to pipe:"]),
    "metrics that cannot be written": (Case.sums, lambda case: replaced(case, "metrics.jsonl"), ["`report`", "open of .*metrics.jsonl"]),
    "samples that cannot be written": (Case.sums, lambda case: replaced(case, "samples.jsonl"), ["`report`", "open of .*samples.jsonl"]),
    "a summary that cannot be written": (unwritable, None, ["`report`", "open of .*summary.json.tmp"]),
    "a checkpoint that cannot be read": (damaged_state, None, ["`load`", "open of .*state.json"]),
    "a stopped training thread": (Case.sums, Case.stop_thread, ["stopped by a tracer"]),
    "a stopped copier thread": (
        lambda case: case.sums(*OFFLOAD), lambda case: case.stop_thread("firebrick-copi"), ["firebrick-copier", "stopped by a tracer"]
    ),
}
RANKS = {
    "a stopped rank": (Case.sums, lambda case: os.kill(case.rank(1), signal.SIGSTOP), ["rank 0 hung", "rank 1 in "]),
    "a rank whose training thread is stopped": (
        Case.sums, lambda case: case.stop_thread(pid=case.rank(1)), ["rank 1 (hung|is gone: it hung)"]
    ),
    "a rank whose reward hangs": (*armed(ON_RANK_1), ["rank 1 (hung|is gone: it hung)", "reward `judge`, process"]),
}
SAMPLE = [
    "a Python reward in an endless loop", "an environment that is stopped", "a pipe in place of rows", "a Hub that does not answer",
    "metrics that cannot be written", "a stopped training thread",
]


def check(name, firebrick, limit):
    """What was wrong with a kind of hang; seconds from its cause to its end."""
    prepare, arm, expected = {**KINDS, **RANKS}[name]
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder), firebrick, limit, name in RANKS)
        case.settings.append(f"trainer.heartbeat_timeout={limit}")
        try:
            prepare(case)
            begun = time.monotonic()
            case.start(*getattr(case, "more", []), stderr=getattr(case, "stderr", None))
            if arm:
                case.await_checkpoint()
                begun = time.monotonic()
                arm(case)
            code = case.await_end(begun)
            took = time.monotonic() - begun
            said = case.said() + case.reports()
            if code != 4:
                raise Failed(f"exit code {code}: {said[-1500:]}")
            for expression in expected:
                if not re.search(expression, said):
                    raise Failed(f"no {expression} in: {said[-3000:]}")
            if case.run.is_dir() and not case.reports():
                raise Failed("no report in the run folder")
            time.sleep(0.3)
            if left := case.processes():
                names = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:80] for pid in left]
                raise Failed(f"left behind: {names}")
            getattr(case, "heal", lambda: None)()
            last = case.last()
            case.start(*(["--resume"] if (case.run / "config.yaml").exists() else []), f"trainer.steps={last + 1}")
            try:
                code = case.process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                raise Failed(f"did not go on: {case.said()}") from None
            if code != 0 or case.last() != last + 1:
                raise Failed(f"went on from step {last} to {case.last()} with exit code {code}: {case.said()}")
            return None, took
        except Failed as failed:
            return str(failed), 0.0
        finally:
            case.end()


def built():
    command = ["cargo", "build", "--release", "--no-default-features", "--features", "mpi", "--bin", "firebrick"]
    subprocess.run(command, cwd=ROOT, check=True)
    about = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, capture_output=True, check=True)
    return str(Path(json.loads(about.stdout)["target_directory"]) / "release/firebrick")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--firebrick", help="a program with the feature `mpi`; cargo builds it where absent")
    parser.add_argument("--only", nargs="+", help="names of kinds")
    parser.add_argument("--sample", action="store_true", help="the kinds of the test suite")
    parser.add_argument("--limit", type=float, default=4.0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = options.only or (SAMPLE if options.sample else [*KINDS, *RANKS])
    firebrick = os.path.abspath(options.firebrick or built())
    wrong = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, (problem, took) in zip(names, pool.map(lambda name: check(name, firebrick, options.limit), names)):
            wrong += problem is not None
            print(f"FAILED  {name}: {problem}" if problem else f"ok      {name}: {took:.1f} s", flush=True)
    print(f"{len(names) - wrong} passed, {wrong} failed")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
