"""Cases on real gloo processes."""
