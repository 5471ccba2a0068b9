"""Runs of the smoke chain that were not killed, for all tests of a test process."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.smoke_chain import Undisturbed


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> "Undisturbed":
    return run_in(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> "Undisturbed":
    """With pictures."""
    return run_in(tmp_path_factory.mktemp("drawn"), draws=True)


def run_in(folder: Path, draws: bool = False) -> "Undisturbed":
    # Here: `pytest tests/chain` reads this file before tests/conftest.py has shut the network.
    from tests.smoke_chain import operations_of, start

    code, output = start(folder, draws=draws)
    assert code == 0, output
    return folder, operations_of(output)
