"""The tree of modules, a role for each parameter, its parts, and parameter groups."""
