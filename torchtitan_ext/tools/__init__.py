"""Commands around a training run."""
