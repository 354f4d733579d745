"""The engine's HTTP face: what clients may ask, in two dialects, and how answers are told."""
