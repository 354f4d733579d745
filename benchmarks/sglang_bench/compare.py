"""How far two answers to one question are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_bench.ask import Reply
from sglang_bench.results import spread


class Distance(NamedTuple):
    equal: bool  #: the same ids
    prefix: int  #: ids that are equal from the first on
    logprob: float  #: largest difference of a logprob of those
    bits: bool  #: ids and logprobs are the same


def distance(one: Reply, other: Reply) -> Distance:
    pairs = list(zip(one.ids, other.ids, strict=False))
    prefix = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    apart = [abs(a - b) for a, b in zip(one.logprobs[:prefix], other.logprobs[:prefix], strict=False)]
    equal = one.ids == other.ids and bool(one.ids)
    return Distance(equal, prefix, round(max(apart, default=0.0), 5), equal and one.logprobs == other.logprobs)


def summary(found: Sequence[tuple[Reply, Reply]]) -> dict[str, Any]:
    """Of answers and the oracle's; answers that are errors are counted apart."""
    answered = [(one, other) for one, other in found if one.error is None and other.error is None]
    distances = [distance(one, other) for one, other in answered]
    return {
        "asked": len(found),
        "errors": [reply.error for pair in found for reply in pair if reply.error][:5],
        "answered": len(answered),
        "ids_equal": sum(each.equal for each in distances),
        "bit_equal": sum(each.bits for each in distances),
        "logprob_distance": spread(each.logprob for each in distances),
        "equal_prefix": spread(each.prefix for each in distances),
    }
