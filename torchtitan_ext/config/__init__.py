"""Configs: TOML files and command lines, made complete and checked once."""
