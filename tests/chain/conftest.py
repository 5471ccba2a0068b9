"""A run of the smoke chain that was not killed, for all tests of a test process."""

import pytest

from tests.smoke_chain import Undisturbed, operations_of, start


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = start(folder)
    assert code == 0, output
    return folder, operations_of(output)
