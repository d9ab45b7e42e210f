"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import titan_ranks


@pytest.fixture(scope="session")
def titan() -> Iterator[titan_ranks.Server]:
    """Runs training through torchtitan on ranks that are forked, not started."""
    server = titan_ranks.Server()
    yield server
    server.close()
