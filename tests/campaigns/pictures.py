"""The README's picture: the live view of a run of examples/arithmetic.yaml under tmux, as SVG."""

import argparse
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from live import Window, steps, train  # noqa: E402
from terminal_picture import svg  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLUMNS, ROWS = 112, 32
# the step of 400 at which the screen is taken
STEP = 240


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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"), help="the program (default: %(default)s)")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs/pictures", help="the folder for the picture (default: %(default)s)")
    parser.add_argument("--run", type=pathlib.Path, help="keep the run in this new folder")
    parser.add_argument("--most-seconds", type=float, default=1500.0, help="time for the run (default: %(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="firebrick-pictures-") as folder:
        folder = pathlib.Path(folder)
        run = options.run or folder / "arithmetic"
        screen = live(options, folder, run.resolve())
        (options.output / "live.svg").write_text(svg(screen, COLUMNS, "The live view of a GRPO run: curves, phases, memory and samples in a terminal"))
    print(f"{options.output / 'live.svg'}: {(options.output / 'live.svg').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
