"""Kernels on CPU."""

import os

_MOST_PRODUCTS = "256"
"""Compiled products that PyTorch and oneDNN keep, each; not 1024, which take more than a GB.

Each pair of shape and ``beta`` of a bfloat16 product is compiled by oneDNN, which takes about
0.6 MB, and schedules in transition have other coefficients at every step.
"""

# Read at the first product. What the user has set stands.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, _MOST_PRODUCTS)
