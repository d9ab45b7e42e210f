"""What the project adds to torchtitan: models, optimizers, metrics, CPU support."""
