"""A run's folder: what it holds, who writes into it, and what it took."""
