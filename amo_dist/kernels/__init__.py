"""Mathematics on plain local tensors ``(..., m, n)``."""

import os

# PyTorch and oneDNN each keep so many compiled products. With their default of 1024 a run takes
# more than a GB: oneDNN compiles a bfloat16 product of about 0.6 MB for each pair of shape and
# ``beta``, and schedules in transition have other coefficients at every step. Both variables are
# read at the first product; a value that the user has set stays.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "256")
