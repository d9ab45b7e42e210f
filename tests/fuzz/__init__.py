"""Random models, layouts and options against the twin: ``python -m tests.fuzz --cases 500``."""
