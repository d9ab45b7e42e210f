"""Mathematics on plain local tensors ``(..., m, n)``."""

import os

# Compiled products that PyTorch and oneDNN keep, each; not 1024, which take more than a GB: each
# pair of shape and ``beta`` of a bfloat16 product is compiled by oneDNN, which takes about 0.6 MB,
# and schedules in transition have other coefficients at every step. Read at the first product; what
# the user has set stands.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "256")
