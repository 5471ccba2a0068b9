"""What all tests share: no network, one thread per worker, fixed seeds, the shared test data."""

import gc
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ecosystem(name, result, words): a row of the table in docs/library.md"
    )
    # Before a test module imports the libraries, which read these once on import.
    os.environ["HF_HUB_OFFLINE"] = "1"
    # A folder without what the user has fetched, and without accelerate's own settings.
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="bosch-tests-")
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_ENDPOINT"):
        os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = "1"  # test processes run side by side
    os.environ["MPLBACKEND"] = "agg"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it warns when a process with threads forks
    # A terminal or CI may set these: tests write to pipes, of the same width everywhere.
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        os.environ.pop(name, None)
    os.environ["COLUMNS"] = "100"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The same examples in every run, no deadline, no folder of past failures.
    hypothesis.settings.register_profile(
        "reproducible", derandomize=True, deadline=None, database=None
    )
    hypothesis.settings.load_profile("reproducible")


def pytest_collection_finish() -> None:
    # What the imports made stays: garbage is collected in it no more, which takes .3 s each time.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
    gc.unfreeze()  # else what the libraries never see freed is named at the end as leaked


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seeds the global generators; those of torch and numpy only if they are imported."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def small_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is about pictures is marked `pictures`: in other tests they have one pixel."""
    has_pictures = find_spec("matplotlib") is not None  # not on every machine that tests a GPU
    if has_pictures and request.node.get_closest_marker("pictures") is None:
        from matplotlib.figure import Figure

        from tests.pictures import save_a_pixel

        monkeypatch.setattr(Figure, "savefig", save_a_pixel)


@pytest.fixture(autouse=True)
def quiet_end() -> Iterator[None]:
    """Undo what a command set up in this process: log handlers, a process group, threads."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
    if dist := sys.modules.get("bosch.run.dist"):
        dist.leave_ranks()
    if progress := sys.modules.get("bosch.run.progress"):
        progress.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real inputs that are not in the repository: mask patterns of other projects, essays."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("BOSCH_SHARED_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no shared test data in {folder}; set BOSCH_SHARED_DATA to its folder")
    return folder
