"""The HTML report in a browser: size, load time, every view, hostile texts, keyboard, screenshots."""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
import synthetic_run  # noqa: E402
from webdriver import Browser  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
VIEWS = ["overview", "curves", "rewards", "samples", "memory", "time", "plan", "settings"]
# what each view cannot be without
CONTENTS = {
    "overview": "#view-overview figure svg path", "curves": "#view-curves figure svg path", "rewards": "#view-rewards figure svg path",
    "samples": "#view-samples .group .sample .text", "memory": "#view-memory figure svg path", "time": "#view-time table td",
    "plan": "#view-plan .bar .piece", "settings": "#view-settings table td",
}
MOST_BYTES = 8_000_000
failures = []


def check(holds, what):
    print(("ok      " if holds else "FAILED  ") + what, flush=True)
    if not holds:
        failures.append(what)


def make(options, folder):
    """Writes runs and their reports."""
    runs = folder / "runs"
    synthetic_run.write(runs / "seed-1", 1, 1000, 8, hostile=True)
    for seed, lr in ((2, 1e-6), (3, 1e-6), (4, 3e-6)):
        synthetic_run.write(runs / f"seed-{seed}", seed, 300, 2, lr)

    def report(name, *names):
        paths = [str(runs / run) for run in names]
        began = time.monotonic()
        subprocess.run([options.firebrick, "report", *paths, "--output", str(folder / name)], check=True, stdout=subprocess.DEVNULL)
        print(f"        {name}: {(folder / name).stat().st_size:,} bytes, written in {time.monotonic() - began:.2f} s")
        return folder / name

    empty = runs / "bare"
    empty.mkdir()
    (empty / "config.yaml").write_text(synthetic_run.config(1, 1e-6))
    report("bare.html", "bare")
    return {"one": report("one.html", "seed-1"), "several": report("several.html", "seed-1", "seed-2", "seed-3", "seed-4")}


def load_time(browser, page):
    """Seconds from the beginning of loading until the first chart is drawn, the least of three: a shared machine adds, and takes nothing away."""
    times = []
    for _ in range(3):
        browser.open(page.as_uri())
        wait(browser, CONTENTS["overview"])
        times.append(browser.script("return performance.getEntriesByName('drawn')[0].startTime / 1000"))
    return min(times)


def wait(browser, selector, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if browser.script("return document.querySelector(arguments[0]) !== null", selector):
            return True
        time.sleep(0.05)
    return False


def click_through(browser, page, name, theme, width, shots):
    """Every view: it is there, fits, and complains of nothing."""
    browser.theme(theme)
    browser.size(width, 900)
    browser.open(page.as_uri())
    for view in VIEWS:
        browser.click(f"#nav a[href='#{view}']")
        label = f"{name}, {theme}, {width} px: {view}"
        check(wait(browser, CONTENTS[view]), f"{label} is drawn")
        only = browser.script("return [...document.querySelectorAll('main > section')].filter((s) => !s.hidden).map((s) => s.id).join()")
        check(only == f"view-{view}", f"{label} is the one that shows")
        spare = browser.script("return document.documentElement.scrollWidth - innerWidth")
        check(spare <= 0, f"{label} does not scroll sideways ({spare} px)")
        if shots:
            # all charts of the part that is shown are drawn
            browser.size(width, min(2600, browser.script("return document.documentElement.scrollHeight")))
            time.sleep(0.4)
            browser.screenshot(shots / f"{name}-{view}-{theme}-{width}.png")
            browser.size(width, 900)
    check(browser.errors() == [], f"{name}, {theme}, {width} px: the console is quiet")


def hostile(browser, page):
    """The first group's texts try to end the page, to run and to turn the direction of lines."""
    browser.open(page.as_uri() + "#samples")
    wait(browser, CONTENTS["samples"])
    check(browser.script("return window.broken === undefined && !document.querySelector('main img, main script')"), "a hostile text is not markup")
    text = browser.script("return document.querySelector('#view-samples .sample .text').textContent")
    check("</script><script>window.broken = 1</script>" in text, "it is shown as text")
    check("RLO" in text and "\u202e" not in text and "NUL" in text and "\u0000" not in text, "its control characters are named")
    long = browser.script("return document.querySelectorAll('#view-samples .sample')[1].textContent")
    check("characters are not in this report" in long and len(long) < 40_000, "a megabyte of text is cut and says so")
    loads = browser.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    check(loads == [], f"nothing is loaded {loads}")
    browser.errors()


def tokens(browser, page, shots):
    """Completions token by token: each way to colour them, keys, hostile pieces, wide and narrow, light and dark, paper."""
    levels = "return new Set([...document.querySelectorAll('#view-samples .tokens .tok')].map((token) => token.className.replace(/ (masked|here)/g, ''))).size"
    choose = "const box = [...document.querySelectorAll('#view-samples select')].at(-1); box.value = arguments[0]; box.dispatchEvent(new Event('change'))"
    for theme in ("light", "dark"):
        for width in (1280, 360):
            browser.theme(theme)
            browser.size(width, 900)
            browser.open("about:blank")
            browser.open(page.as_uri() + "#samples")
            wait(browser, CONTENTS["samples"])
            browser.click("#view-samples [data-filter='tokens']")
            for mode in ("logp", "advantage", "mismatch"):
                began = time.monotonic()
                browser.script(choose, mode)
                took = time.monotonic() - began
                label = f"tokens by {mode}, {theme}, {width} px"
                check(browser.script(levels) >= 4, f"{label}: several levels are shown, drawn in {took:.2f} s")
                check(browser.script("return document.querySelectorAll('#view-samples .tokenlegend li').length") >= 6, f"{label}: there is a legend")
                spare = browser.script("return document.documentElement.scrollWidth - innerWidth")
                check(spare <= 0, f"{label}: nothing scrolls sideways ({spare} px)")
                if shots:
                    browser.size(width, 1600)
                    time.sleep(0.2)
                    browser.screenshot(shots / f"tokens-{mode}-{theme}-{width}.png", 1600)
                    browser.size(width, 900)
    browser.theme("light")
    browser.size(1280, 900)
    check(browser.script("return window.broken === undefined && !document.querySelector('main img, main script')"), "a hostile token is not markup")
    first = browser.script("return document.querySelector('#view-samples .tokens').textContent")
    check("</script>" in first and "RLO" in first and "\u202e" not in first and "\u0000" not in first, "it is shown as text, its control characters named")
    long = browser.script("return document.querySelectorAll('#view-samples .tokens')[1].textContent")
    check("more tokens are not in this report" in long, "what is left out of a long completion is said")
    browser.script("document.querySelectorAll('#view-samples .tokens')[4].focus()")
    browser.keys("\ue014\ue014\ue014")
    said = browser.script("return document.querySelectorAll('#view-samples .tokensaid')[4].textContent")
    check(said.startswith("token 3 of ") and "advantage" in said and "mismatch" in said, f"arrow keys go from token to token ({said[:60]}…)")
    here = browser.script("const box = document.activeElement; return [box.getAttribute('role'), box.querySelectorAll('[aria-selected=true]').length, box.getAttribute('aria-activedescendant') === box.querySelector('.here').id]")
    check(here == ["listbox", 1, True], "the token is the list's current option")
    lines = browser.script("return ['.l2:not(.minus)', '.l4.minus'].map((name) => { const own = document.querySelector('#view-samples .tokenlegend .tok' + name); const style = getComputedStyle(own); return own.classList.contains('minus') ? style.borderBottomStyle + ' ' + style.borderBottomWidth : style.boxShadow; })")
    check("-2px" in lines[0] and lines[1] == "dashed 4px", f"levels differ without colour ({lines})")
    browser.devtools("Emulation.setEmulatedMedia", media="print")
    check(browser.script("return getComputedStyle(document.querySelector('#view-samples .tok.l3')).printColorAdjust") == "exact", "paper keeps the tokens' colours")
    if shots:
        browser.screenshot(shots / "paper-tokens.png", 1600)
    browser.devtools("Emulation.setEmulatedMedia", media="")
    check(browser.errors() == [], "tokens: the console is quiet")


def bare(browser, page):
    """A run of which there is only a configuration: every view says in a line what is missing."""
    browser.open(page.as_uri())
    for view in VIEWS[1:-1]:
        browser.click(f"#nav a[href='#{view}']")
        said = browser.script("return [...document.querySelectorAll('#view-' + arguments[0] + ' .absent')].map((p) => p.textContent).join(' ')", view)
        check("There is no " in said, f"a run without files: {view} says so ({said[:40]}…)")
    check(browser.errors() == [], "a run without files: the console is quiet")


def paper(browser, page, shots):
    """The page as it is printed."""
    browser.size(900, 900)
    browser.devtools("Emulation.setEmulatedMedia", media="print")
    for view in ("overview", "samples", "memory"):
        browser.open("about:blank")
        browser.open(page.as_uri() + f"#{view}")
        wait(browser, CONTENTS[view])
        check(browser.script("return getComputedStyle(document.getElementById('nav')).display") == "none", f"paper has no buttons: {view}")
        if shots:
            browser.size(900, 2600)
            time.sleep(0.4)
            browser.screenshot(shots / f"paper-{view}.png")
    browser.devtools("Emulation.setEmulatedMedia", media="")


def use(browser, page, shots):
    """Filters, search and keys."""
    browser.size(1280, 900)
    browser.open(page.as_uri() + "#samples")
    wait(browser, CONTENTS["samples"])
    status = "return parseInt(document.querySelector('#view-samples .status').textContent.replace(',', ''))"
    whole = browser.script(status)
    for name in ("truncated", "no_spread", "best", "worst"):
        browser.click(f"#view-samples [data-filter='{name}']")
        found = browser.script(status)
        check(0 < found < whole, f"the filter {name} leaves {found} of {whole} groups")
    browser.click("#view-samples [data-filter='all']")
    browser.keys("/")
    check(browser.script("return document.activeElement.type") == "search", "/ goes to the search")
    browser.keys("desrever")
    time.sleep(0.4)
    check(browser.script(status) == 1, "the search finds the one group with a word")
    check(browser.script("return document.querySelector('#view-samples mark').textContent") == "desrever", "and marks it")
    browser.keys("\ue00c2")
    check(browser.script("return location.hash") == "#curves", "a digit changes the view")
    wait(browser, CONTENTS["curves"])
    browser.script("document.querySelector('#view-curves .plot').focus()")
    browser.keys("\ue014\ue014")
    tip = browser.script("const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent")
    if shots:
        browser.screenshot_window(shots / "cursor.png")
    check(tip.startswith("step "), f"arrow keys move a chart's cursor ({tip[:40]})")
    browser.open("about:blank")
    browser.open(page.as_uri())
    browser.keys("\ue004")
    check(browser.script("return document.activeElement.className") == "skip", "the first stop of Tab skips to the report")
    before = browser.script("return getComputedStyle(document.body).color")
    browser.click("#theme")
    after = browser.script("return getComputedStyle(document.body).color")
    check(before != after, "the button changes the theme")
    browser.click("#theme")
    check(len(browser.printed()) > 20_000, "the page prints")
    check(browser.errors() == [], "the console is quiet")


def own(browser, options, page):
    """The report of a run that was trained: size, load time, every view."""
    began = time.monotonic()
    subprocess.run([options.firebrick, "report", str(options.run), "--output", str(page)], check=True, stdout=subprocess.DEVNULL)
    took, size = time.monotonic() - began, page.stat().st_size
    check(size <= MOST_BYTES, f"the report of {options.run.name} takes {size:,} bytes, written in {took:.2f} s")
    browser.size(1280, 900)
    loaded = load_time(browser, page)
    check(loaded < options.most_seconds, f"it opens in {loaded:.2f} s")
    for theme in ("light", "dark"):
        for width in (1280, 360):
            click_through(browser, page, "own", theme, width, options.screenshots)
    browser.theme("light")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--firebrick", default=str(ROOT / "target/release/firebrick"), help="the program (default: %(default)s)")
    parser.add_argument("--run", type=pathlib.Path, help="a run of one's own, whose report is opened and clicked through too")
    parser.add_argument("--screenshots", type=pathlib.Path, help="write screenshots of every view into this folder")
    parser.add_argument("--most-seconds", type=float, default=1.0, help="load time that is allowed (default: %(default)s)")
    options = parser.parse_args()
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="firebrick-report-") as folder:
        pages = make(options, pathlib.Path(folder))
        size = pages["one"].stat().st_size
        check(size <= MOST_BYTES, f"a run of 1,000 steps and 64,000 samples takes {size:,} bytes")
        browser = Browser()
        try:
            browser.size(1280, 900)
            loaded = load_time(browser, pages["one"])
            check(loaded < options.most_seconds, f"it opens in {loaded:.2f} s")
            for name, page in pages.items():
                for theme in ("light", "dark"):
                    for width in (1280, 360):
                        click_through(browser, page, name, theme, width, options.screenshots)
            browser.theme("light")
            if options.run:
                own(browser, options, pathlib.Path(folder) / "own.html")
            hostile(browser, pages["one"])
            tokens(browser, pages["one"], options.screenshots)
            bare(browser, pathlib.Path(folder) / "bare.html")
            paper(browser, pages["one"], options.screenshots)
            use(browser, pages["one"], options.screenshots)
        finally:
            browser.close()
    if failures:
        raise SystemExit(f"{len(failures)} checks failed")
    print("all checks hold")


if __name__ == "__main__":
    main()
