"""Progress, not /health."""
