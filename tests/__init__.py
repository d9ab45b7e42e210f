"""The test suite; a package, so that worker processes can import its modules by name."""
