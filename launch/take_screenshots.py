"""Takes screenshots of TensorBoard, over a folder of runs, and of reports: light, dark, on a phone.

    python launch/take_screenshots.py --runs runs --report comparison/report.html --out pictures

Needs Chromium or Chrome (Debian: apt-get install chromium) and the package tensorboard.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # inside a container there is none
    "--disable-gpu",
    "--disable-background-networking",
    "--hide-scrollbars",
)
# Page of TensorBoard -> the end of its address. Only the curves for comparing runs, unsmoothed.
PAGES = {
    "curves": "#scalars&tagFilter=^tokens%2F(niah%2Faverage|longbench%2Faverage|train%2Floss)"
    "&_smoothingWeight=0",
    "custom_scalars": "#custom_scalars&_smoothingWeight=0",
    "hparams": "#hparams",
    "images": "#images",
    "text": "#text",
}
WIDTH, HEIGHT = 1500, 1100
REPORT_HEIGHT = 3_000  # longer reports are cut off
PHONE_WIDTH = 390
DARK = "--blink-settings=preferredColorScheme=0"
# In Chromium's virtual time, which runs faster than real time while a page waits.
PAGE_MILLISECONDS = 30_000
START_SECONDS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="folder of runs, for TensorBoard")
    parser.add_argument("--report", type=Path, nargs="*", default=[], help="report.html files")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the PNGs")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"error: none of {', '.join(BROWSERS)} is installed; screenshots need a browser.")
    options.out.mkdir(parents=True, exist_ok=True)
    for report in options.report:
        address, name = report.resolve().as_uri(), f"report-{report.resolve().parent.name}"
        take(browser, address, options.out / f"{name}.png", REPORT_HEIGHT)
        take(browser, address, options.out / f"{name}-dark.png", REPORT_HEIGHT, DARK)
        with tempfile.NamedTemporaryFile("w", suffix=".html") as frame:
            print(phone_page(address), file=frame, flush=True)
            take(browser, f"file://{frame.name}", options.out / f"{name}-phone.png", REPORT_HEIGHT)
    if options.runs:
        address = start_tensorboard(options.runs)
        for page, part in PAGES.items():
            take(browser, f"{address}/{part}", options.out / f"tensorboard-{page}.png", HEIGHT)


def phone_page(address: str) -> str:
    """A page that shows another as a phone does: no window of Chromium is that narrow."""
    style = f"width: {PHONE_WIDTH}px; height: 98vh; border: 1px solid"
    return f'<!DOCTYPE html><iframe src="{address}" style="{style}"></iframe>'


def start_tensorboard(runs: Path) -> str:
    """Its address, once it has read all files: until then its list of runs grows. It ends with this
    process."""
    from tensorboard import program

    if not runs.is_dir():
        sys.exit(f"error: {runs} is not a folder of runs.")
    server = program.TensorBoard()
    server.configure(logdir=str(runs), port=0, load_fast="false")
    address, before = server.launch().rstrip("/"), b""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        now = urllib.request.urlopen(f"{address}/data/runs").read()
        if now == before and len(now) > len("[]\n"):
            return address
        before = now
        time.sleep(2)
    sys.exit(f"error: TensorBoard found no runs in {START_SECONDS} seconds.")


def take(browser: str, address: str, path: Path, height: int, *more_flags: str) -> None:
    flags = [
        *FLAGS,
        f"--window-size={WIDTH},{height}",
        f"--virtual-time-budget={PAGE_MILLISECONDS}",
        f"--screenshot={path.resolve()}",
        *more_flags,
    ]
    path.unlink(missing_ok=True)
    done = subprocess.run([browser, *flags, address], capture_output=True, text=True)
    if not path.is_file():
        sys.exit(f"error: {browser} took no picture of {address}: {done.stderr.strip()[-300:]}")
    print(path)


if __name__ == "__main__":
    main()
