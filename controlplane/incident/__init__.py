"""Real A/B experiments on the embedded engine."""
