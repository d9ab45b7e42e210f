"""From TOML files and a command line to one checked config."""
