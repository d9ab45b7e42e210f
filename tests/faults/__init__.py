"""Kill training at random, resume it, and compare: ``python -m tests.faults --number 100``."""
