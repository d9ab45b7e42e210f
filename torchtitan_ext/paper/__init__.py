"""``amo paper``: what serves the AMO paper alone, its experiments, evaluations and tables."""
