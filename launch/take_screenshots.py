"""Pictures of what users see: TensorBoard over a folder of runs, and reports.

    python launch/take_screenshots.py --runs runs --report comparison/report.html --out pictures

Needs Chromium or Chrome (Debian: apt-get install chromium) and nothing from Python but TensorBoard.
"""

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Page of TensorBoard -> the end of its address: only the curves that runs are compared by, as they
# are (without smoothing).
PAGES = {
    "curves": "#scalars&tagFilter=^tokens%2F(niah%2Faverage|longbench%2Faverage|train%2Floss)"
    "&_smoothingWeight=0",
    "custom_scalars": "#custom_scalars&_smoothingWeight=0",
    "hparams": "#hparams",
    "images": "#images",
    "text": "#text",
}
WIDTH, HEIGHT = 1500, 1100
REPORT_HEIGHT = 9_000  # of three runs; what is longer is cut off
# Chromium's own clock runs ahead while a page waits, so this is less in ours.
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
        sys.exit(
            f"error: none of {', '.join(BROWSERS)} is installed; a browser takes the pictures."
        )
    options.out.mkdir(parents=True, exist_ok=True)
    for report in options.report:
        name = f"report-{report.resolve().parent.name}.png"
        take(browser, report.resolve().as_uri(), options.out / name, REPORT_HEIGHT)
    if options.runs:
        with tensorboard(options.runs) as address:
            for page, part in PAGES.items():
                take(browser, f"{address}/{part}", options.out / f"tensorboard-{page}.png", HEIGHT)


@contextlib.contextmanager
def tensorboard(runs: Path) -> Iterator[str]:
    """The address of a TensorBoard over these runs, while the block lasts."""
    if not runs.is_dir():
        sys.exit(f"error: {runs} is no folder of runs.")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--port", str(port)]
    server = subprocess.Popen(
        [*command, "--load_fast=false"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_runs(f"{address}/data/runs", server)
        yield address
    finally:
        server.terminate()
        server.wait()


def wait_for_runs(address: str, server: subprocess.Popen[bytes]) -> None:
    """Until TensorBoard has read all files: it lists more runs no more."""
    end, before = time.monotonic() + START_SECONDS, b""
    while time.monotonic() < end:
        if server.poll() is not None:
            sys.exit("error: TensorBoard ended before it answered.")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            now = urllib.request.urlopen(address).read()
            if now == before and len(now) > len("[]\n"):
                return
            before = now
        time.sleep(2)
    sys.exit(f"error: TensorBoard found no runs in {START_SECONDS} seconds.")


def take(browser: str, address: str, path: Path, height: int) -> None:
    flags = [
        "--headless=new",
        "--no-sandbox",  # inside a container there is none
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{height}",
        f"--virtual-time-budget={PAGE_MILLISECONDS}",
        f"--screenshot={path.resolve()}",
    ]
    path.unlink(missing_ok=True)
    done = subprocess.run([browser, *flags, address], capture_output=True, text=True)
    if not path.is_file():
        sys.exit(f"error: {browser} took no picture of {address}: {done.stderr.strip()[-300:]}")
    print(path)


if __name__ == "__main__":
    main()
