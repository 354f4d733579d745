"""Exhaustive exploration of the pure machines in small worlds."""
