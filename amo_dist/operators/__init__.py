"""Which parameter is which operator: names and shapes to operator types and parameter groups."""
