"""The README's pictures, from a run of examples/arithmetic.yaml: the live view under tmux as SVG, and the report in Chromium as PNG."""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from live import Window, steps, train  # noqa: E402
from terminal_picture import svg  # noqa: E402
from webdriver import Browser  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLUMNS, ROWS = 112, 32
# the step of 400 at which the screen is taken
STEP = 240
MOST_BYTES = 150_000


def live(options, folder, run):
    """Trains to the end; gives the screen of a step in the middle."""
    window = Window(folder, COLUMNS, ROWS)
    try:
        train(window, options, run)
        screen = window.wait(lambda screen: steps(screen) >= STEP, options.most_seconds)
        if steps(screen) < STEP:
            raise SystemExit(f"error: step {STEP} was not reached in {options.most_seconds} s\n{screen}")
        taken = window.screen("-e")
        end = time.monotonic() + options.most_seconds
        while not (run / "summary.json").exists() and time.monotonic() < end:
            time.sleep(1)
        return taken
    finally:
        window.close()


def report(options, run, picture):
    """The report's first page as it opens."""
    page = run / "report.html"
    subprocess.run([options.firebrick, "report", str(run), "--output", str(page)], check=True)
    browser = Browser()
    try:
        browser.theme("light")
        browser.size(1180, 760)
        browser.open(page.as_uri())
        time.sleep(2)
        browser.screenshot_window(picture)
        errors = browser.errors()
        if errors:
            raise SystemExit(f"error: the console says {errors}")
    finally:
        browser.close()
    # fewer colours: a third of the size, no difference to be seen
    if shutil.which("pngquant"):
        subprocess.run(["pngquant", "--force", "--strip", "--output", str(picture), "128", str(picture)], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"), help="the program (default: %(default)s)")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs/pictures", help="the folder for the pictures (default: %(default)s)")
    parser.add_argument("--run", type=pathlib.Path, help="keep the run in this new folder")
    parser.add_argument("--most-seconds", type=float, default=1500.0, help="time for the run (default: %(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="firebrick-pictures-") as folder:
        folder = pathlib.Path(folder)
        run = options.run or folder / "arithmetic"
        screen = live(options, folder, run.resolve())
        (options.output / "live.svg").write_text(svg(screen, COLUMNS, "The live view of a GRPO run: curves, phases, memory and samples in a terminal"))
        report(options, run, options.output / "report.png")
    for name in ("live.svg", "report.png"):
        size = (options.output / name).stat().st_size
        print(f"{options.output / name}: {size:,} bytes")
        if size > MOST_BYTES:
            raise SystemExit(f"error: {name} is larger than {MOST_BYTES:,} bytes (install pngquant: apt-get install pngquant)")


if __name__ == "__main__":
    main()
