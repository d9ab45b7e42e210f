"""Kill training at random, resume it, and compare: ``python -m tests.faults --trials 100``."""
