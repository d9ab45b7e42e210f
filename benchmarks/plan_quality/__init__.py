"""What Newton-Schulz flops buy: uniform steps, plans by several measures, and the exact norm."""
