"""Operator types and parameter groups, from the names and shapes of parameters."""
