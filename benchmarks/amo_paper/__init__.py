"""The runs, evaluations and tables of the AMO paper: ``python -m benchmarks.amo_paper``."""
