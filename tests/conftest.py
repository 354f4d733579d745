"""What holds for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Nothing is judged by how long it took; and every run draws the same examples, so that one that fails was there
# before the change that it is run for.
settings.register_profile(
    "project", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("project")
