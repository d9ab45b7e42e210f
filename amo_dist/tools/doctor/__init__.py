"""``doctor``: whether this machine, or this cluster, runs the optimizer, and how fast."""
