"""The tests of the studies run ranks as the others do."""

from tests.conftest import run_on

__all__ = ["run_on"]
