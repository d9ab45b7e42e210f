"""Fixtures of the integration tests."""

from __future__ import annotations

import pytest

from tests.integration.titan_ranks import Server


@pytest.fixture(scope="session")
def titan() -> Server:
    """Runs training through torchtitan on ranks that are forked, not started."""
    return Server()
