"""The checks by name, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable

Check = Callable[[bool], None]

CHECKS: dict[str, Check] = {}
#: Checks that have no meaning without hooks.
ALONE: set[str] = set()
#: Checks of a hook that not every release needs.
NEEDS: dict[str, str] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def alone(function: Check) -> Check:
    ALONE.add(function.__name__)
    return check(function)


def needs(hook: str) -> Callable[[Check], Check]:
    def noted(function: Check) -> Check:
        NEEDS[function.__name__] = hook
        return function

    return noted
