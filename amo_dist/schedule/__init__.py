"""Schedules: which Newton-Schulz coefficients each operator type uses at each optimizer step.

Pure Python: neither tensors nor process groups.
"""
