"""The live view under tmux: driven by keys in windows of 80x24 and 200x60, its screens beside those that are kept, what it costs a step,
and what is left of the terminal when the program is killed."""

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests/campaigns/support"
SCREENS = SUPPORT / "screens"
sys.path.insert(0, str(SUPPORT))
import synthetic_run  # noqa: E402

SIZES = [(80, 24), (200, 60)]
PROMPT = "ready$ "
failures = []


def check(holds, what, screen=""):
    print(("ok      " if holds else "FAILED  ") + what, flush=True)
    if not holds:
        failures.append(what)
        if screen:
            print(screen)


class Window:
    """A shell in a tmux server of its own."""

    def __init__(self, folder, columns, rows, environment=()):
        self.socket = str(folder / f"tmux-{columns}-{len(os.listdir(folder))}")
        self.columns, self.rows = columns, rows
        shell = ["env", *environment, f"PS1={PROMPT}", "bash", "--norc", "--noprofile", "-i"]
        settings = folder / "tmux.conf"
        settings.write_text("set -g status off\nset -g default-terminal screen-256color\n")
        self.tmux("-f", str(settings), "new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(folder), *shell)
        self.wait(lambda screen: PROMPT.strip() in screen)

    def tmux(self, *arguments):
        run = subprocess.run(["tmux", "-S", self.socket, *arguments], check=True, capture_output=True, text=True)
        return run.stdout

    def screen(self, *options):
        return self.tmux("capture-pane", "-p", *options)

    def type(self, *keys):
        self.tmux("send-keys", *keys)

    def run(self, command):
        self.type("-l", command)
        self.type("Enter")

    def ask(self, what):
        return self.tmux("display-message", "-p", what).strip()

    def wait(self, holds, seconds=60, every=0.05):
        """The screen once it is as wanted, or as it is at the end of the time. `every` is the seconds between two looks."""
        end = time.monotonic() + seconds
        while True:
            screen = self.screen()
            if holds(screen) or time.monotonic() > end:
                return screen
            time.sleep(every)

    def pid(self):
        """The program that the shell runs."""
        shell = self.ask("#{pane_pid}")
        found = subprocess.run(["pgrep", "-P", shell], check=True, capture_output=True, text=True)
        return int(found.stdout.split()[0])

    def close(self):
        subprocess.run(["tmux", "-S", self.socket, "kill-server"], capture_output=True)


def restored(window, why):
    """The shell has its terminal back: no alternate screen, a cursor, echo."""
    screen = window.wait(lambda screen: PROMPT.strip() in screen and "next sample" not in screen, 10)
    check(window.ask("#{alternate_on}") == "0", f"{why}: the alternate screen is left", screen)
    check(window.ask("#{cursor_flag}") == "1", f"{why}: the cursor is shown")
    window.run("stty -a | tr ' ' '\\n' | grep -xE -- '-?(icanon|echo|isig|opost)' | sort | tr '\\n' ' '; echo done")
    screen = window.wait(lambda screen: "opost done" in screen, 10)
    check("echo icanon isig opost done" in screen, f"{why}: lines, echo and signals are as before", screen)


def colours(screen):
    """The colours of a captured screen; 39 and 49 are no colours, but the terminal's own."""
    codes = {int(code) for sequence in re.findall(r"\x1b\[([\d;]+)m", screen) for code in sequence.split(";") if code}
    return sorted(code for code in codes if code // 10 in (3, 4, 9, 10) and code not in (39, 49))


def train(window, options, output, *overrides):
    words = [options.firebrick, "train", str(ROOT / "examples/arithmetic.yaml"), f"output={output}", *overrides]
    window.run("clear; " + shlex.join(words))


def steps(screen):
    """The step that a screen shows; 0 during the warm-up."""
    words = screen.split("\n")[0].split()
    return int(words[words.index("step") + 1]) if "step" in words else 0


def keys(options, folder, columns, rows):
    """A run from its start to a stop, by keys."""
    name = f"{columns}x{rows}"
    window = Window(folder, columns, rows)
    output = folder / f"keys-{name}"
    try:
        train(window, options, output)
        screen = window.wait(lambda screen: "warm-up" in screen, 120)
        check("warm-up" in screen and "of 400" in screen, f"{name}: the warm-up is shown", screen)
        screen = window.wait(lambda screen: steps(screen) >= 4, 180)
        lines = screen.rstrip("\n").split("\n")
        check(len(lines) == rows, f"{name}: the window is full: {len(lines)} rows", screen)
        wanted = ["reward", "truncated", "no spread", "entropy", "mismatch", "gen", "update_actor", "planned", "tokens/s", "left",
                  "newest of step", "best", "worst", "read"]
        missing = [word for word in wanted if word not in screen]
        check(not missing, f"{name}: everything is shown (missing: {missing})", screen)
        window.type("n")
        screen = window.wait(lambda screen: "best of step" in screen, 10)
        check("best of step" in screen, f"{name}: n shows another sample", screen)
        window.type("?")
        screen = window.wait(lambda screen: " help " in screen, 10)
        check("the sampler's and the trainer's probabilities" in screen, f"{name}: ? explains", screen)
        window.type("?")
        window.type("p")
        screen = window.wait(lambda screen: "paused" in screen, 20)
        at = steps(screen)
        check("paused" in screen, f"{name}: p pauses", screen)
        time.sleep(2)
        check(steps(window.screen()) == at, f"{name}: a paused run stays at step {at}")
        window.type("s")
        screen = window.wait(lambda screen: f"saved step-{at:06}" in screen, 20)
        check((output / f"checkpoints/step-{at:06}").is_dir(), f"{name}: s writes a checkpoint of step {at}", screen)
        check("paused" in window.screen(), f"{name}: a run that was saved stays paused")
        if options.screens:
            (options.screens / f"{name}.txt").write_text(screen)
        window.type("p")
        screen = window.wait(lambda screen: steps(screen) > at, 20)
        check(steps(screen) > at, f"{name}: p continues", screen)
        window.tmux("resize-window", "-x", "40", "-y", "12")
        screen = window.wait(lambda screen: "mismatch" in screen and len(screen.rstrip("\n").split("\n")) <= 12, 10)
        check("reward" in screen and "? help" in screen, f"{name}: it follows the window's size", screen)
        window.tmux("resize-window", "-x", str(columns), "-y", str(rows))
        window.type("q")
        screen = window.wait(lambda screen: "stopped:" in screen, 30)
        check("stopped:" in screen, f"{name}: q stops after the step, with a summary", screen)
        restored(window, f"{name}, q")
        summary = json.loads((output / "summary.json").read_text())
        check((output / f"checkpoints/step-{summary['steps']:06}").is_dir(), f"{name}: a stopped run has its checkpoint")
        window.run(f"clear; {shlex.join([options.firebrick, 'watch', str(output)])}")
        screen = window.wait(lambda screen: "stopped after step" in screen, 10)
        check("q leave" in screen, f"{name}: watch shows the run that has ended", screen)
        window.type("q")
        restored(window, f"{name}, watch")
    finally:
        window.close()


def differences(found, kept):
    """The lines in which two screens differ, one below the other."""
    found, kept = found.split("\n"), kept.split("\n")
    length = max(len(found), len(kept))
    pairs = zip(found + [""] * (length - len(found)), kept + [""] * (length - len(kept)))
    return "\n".join(f"{at:>4} kept  {k}\n     found {f}" for at, (f, k) in enumerate(pairs) if f != k)


def compared(options, folder, columns, rows):
    """A run that has ended, the same to the character wherever it is watched: its screens after keys and resizes are those that are kept."""
    run = folder / "synthetic"
    if not run.exists():
        synthetic_run.write(run, 1, 40, 8)
    window = Window(folder, columns, rows)

    def state(name):
        kept = SCREENS / f"{columns}x{rows}-{name}.txt"
        if options.keep_screens:
            time.sleep(2)
            kept.write_text(window.screen())
        known = kept.read_text()
        screen = window.wait(lambda screen: screen == known, 20)
        check(screen == known, f"{columns}x{rows}: the screen {kept.name} is the one that is kept", differences(screen, known))

    try:
        # a relative name: the view shows it
        window.run(f"clear; {shlex.join([options.firebrick, 'watch', run.name])}")
        state("begin")
        window.type("n")
        state("best")
        window.type("n")
        state("worst")
        window.type("?")
        state("help")
        window.type("?")
        window.tmux("resize-window", "-x", "40", "-y", "12")
        state("small")
    finally:
        window.close()


def seconds_of_view(pid):
    """Processor seconds that the thread of the view has taken."""
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == "live view":
                fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except FileNotFoundError:
            continue
    return None


def mean_step(output):
    """Seconds of a step, without the first two and without validation."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    return statistics.mean(steps[2:])


def cost(options, folder):
    """On an idle machine: what the view takes of a step: the processor time of its thread beside the time of the run, and steps with it beside steps without."""
    words = [f"trainer.steps={options.steps}", "warmup.sft.steps=60", "trainer.test_freq=1000"]
    ratios, shares = [], []
    for pair in range(options.pairs):
        found = {}
        for plain in (False, True) if pair % 2 else (True, False):
            window = Window(folder, 200, 60)
            output = folder / f"cost-{pair}-{plain}"
            try:
                train(window, options, output, *words, *(["--plain"] if plain else []))
                if not plain:
                    window.wait(lambda screen: steps(screen) >= 3, 180, every=1)
                    pid = window.pid()
                    began, busy = time.monotonic(), seconds_of_view(pid)
                    window.wait(lambda screen: steps(screen) >= options.steps * 3 // 4, 600, every=1)
                    shares.append((seconds_of_view(pid) - busy) / (time.monotonic() - began))
                window.wait(lambda screen: "finished:" in screen, 600, every=1)
            finally:
                window.close()
            found[plain] = mean_step(output)
        ratios.append(found[False] / found[True])
    share, ratio = statistics.median(shares), statistics.median(ratios)
    print(f"        a step with the view takes {ratio:.3f} of one without (median of {len(ratios)} pairs: {' '.join(f'{r:.3f}' for r in ratios)})")
    check(share <= 0.01, f"the view's thread computes {100 * share:.2f} % of a step's time: at most 1 %")


def killed(options, folder, sign):
    """A run that a signal ends."""
    name = signal.Signals(sign).name
    window = Window(folder, 80, 24)
    try:
        train(window, options, folder / f"killed-{name}")
        window.wait(lambda screen: "warm-up" in screen, 120)
        os.kill(window.pid(), sign)
        if sign == signal.SIGKILL:
            time.sleep(1)
            left = window.ask("#{alternate_on}")
            print(f"        SIGKILL: no program can give the terminal back after it (alternate screen still on: {left}); `reset; tput rmcup` does")
            window.run("reset; tput rmcup")
            restored(window, "SIGKILL, then reset and tput rmcup")
            return
        restored(window, name)
    finally:
        window.close()


def stopped(options, folder):
    """Ctrl-Z, another command, fg; then Ctrl-C."""
    window = Window(folder, 80, 24)
    try:
        train(window, options, folder / "stopped")
        window.wait(lambda screen: "warm-up" in screen, 120)
        window.type("C-z")
        screen = window.wait(lambda screen: "Stopped" in screen, 10)
        check("Stopped" in screen, "Ctrl-Z stops the program", screen)
        restored(window, "Ctrl-Z")
        window.run("fg")
        screen = window.wait(lambda screen: "warm-up" in screen or "step" in screen.split("\n")[0], 10)
        check(window.ask("#{alternate_on}") == "1", "fg brings the view back", screen)
        window.type("C-c")
        restored(window, "Ctrl-C")
    finally:
        window.close()


def gone(options, folder):
    """A terminal that is closed: the run goes on to its end."""
    window, output = Window(folder, 80, 24), folder / "gone"
    try:
        train(window, options, output, "trainer.steps=5", "warmup.sft.steps=60")
        window.wait(lambda screen: "warm-up" in screen, 120)
        pid = window.pid()
    finally:
        window.close()
    end = time.monotonic() + 300
    while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    check(not pathlib.Path(f"/proc/{pid}").exists(), "a run without its terminal ends")
    check(json.loads((output / "summary.json").read_text())["steps"] == 5, "a run without its terminal takes all steps")


def lines(options, folder):
    """Where the view does not belong."""
    for name, environment, words in (("CI", ["CI=true"], []), ("TERM=dumb", [], []), ("--plain", [], ["--plain"])):
        window = Window(folder, 80, 24, environment)
        if name == "TERM=dumb":
            window.run("export TERM=dumb")
        try:
            train(window, options, folder / f"lines-{name.strip('-').replace('=', '-')}", "trainer.steps=1", "warmup.sft.steps=2", *words)
            screen = window.wait(lambda screen: "finished:" in screen, 60)
            check("finished:" in screen and window.ask("#{alternate_on}") == "0", f"{name}: lines instead of the view", screen)
        finally:
            window.close()
    window = Window(folder, 80, 24, ["NO_COLOR=1"])
    try:
        train(window, options, folder / "no-colour")
        window.wait(lambda screen: "warm-up" in screen, 120)
        screen = window.screen("-e")
        check(not colours(screen), f"NO_COLOR: no colours {colours(screen)}", screen)
    finally:
        window.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"), help="the program (default: %(default)s)")
    parser.add_argument("--screens", type=pathlib.Path, help="write the screens of both sizes into this folder")
    parser.add_argument("--keep-screens", action="store_true", help="keep the screens of a run that has ended as those to compare with")
    parser.add_argument("--pairs", type=int, default=5, help="runs with the view and without whose steps are compared (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each of them (default: %(default)s)")
    parser.add_argument("--only", choices=["keys", "screens", "cost", "signals", "lines"], help="only this part")
    options = parser.parse_args()
    if shutil.which("tmux") is None:
        raise SystemExit("tmux is missing: apt-get install tmux")
    print(subprocess.run(["tmux", "-V"], capture_output=True, text=True).stdout.strip())
    if options.screens:
        options.screens.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="firebrick-live-") as folder:
        folder = pathlib.Path(folder)
        wanted = lambda part: options.only in (None, part)
        for columns, rows in SIZES:
            if wanted("keys"):
                keys(options, folder, columns, rows)
            if wanted("screens"):
                compared(options, folder, columns, rows)
        if wanted("signals"):
            for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
                killed(options, folder, sign)
            gone(options, folder)
            stopped(options, folder)
        if wanted("lines"):
            lines(options, folder)
        if wanted("cost"):
            cost(options, folder)
    if failures:
        raise SystemExit(f"{len(failures)} checks failed")
    print("all checks hold")


if __name__ == "__main__":
    main()
