"""What a row showed: its answers and page digests against the oracle's. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import Any, NamedTuple

import msgspec

from dsv4ctl.controlplane.incident.rows import Row, Topology
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomState
from dsv4ctl.controlplane.tickets.types import Guard


class Stormed(msgspec.Struct):
    """`seconds`: from the storm until no room of it was in flight and its pages were back. `pages_left`: after that.

    `aborted`: requests that were ended; `failed`: those that were not, and got no answer.
    """

    rooms: int
    aborted: int
    failed: int
    seconds: float
    pages_left: int


class Traced(msgspec.Struct):
    """What the race detector made of the ranks' rings. `rooms`: how many read too early or what was gone.

    `behind`: by room, the consumers whose early reads it depends on, its own or those of whoever computed its pages.
    """

    events: int
    gaps: int
    races: int
    rooms: int
    behind: dict[str, list[str]]


class Named(msgspec.Struct):
    """`corrupted`: rooms with a wrong answer or wrong digests; `named`: those traced back to the ungated consumer."""

    races: int
    corrupted: int
    named: int
    gaps: int


class Expected(NamedTuple):
    """The oracle's answer to one prompt, and its digests: pool -> one folded value a pool layer.

    `full_pages`: without the tail page, which only a prefill engine seals (at the hand-over).
    """

    output_ids: tuple[int, ...]
    folded: Mapping[str, Sequence[int]]
    full_pages: Mapping[str, Sequence[int]]

    def sealed(self, topology: Topology) -> Mapping[str, Sequence[int]]:
        return self.folded if topology == "pd" else self.full_pages


class Asked(NamedTuple):
    """One request that was let run to its end. Without `output_ids` either `error` is set or it never ended."""

    session: int
    round: int
    prompt_tokens: int
    output_ids: tuple[int, ...] | None
    error: str | None
    room: str | None


class Measured(NamedTuple):
    """All that is known of a row once it has run. `rooms`: by key, as the admin API tells them.

    `loads_differ`: by pool, layers of HiCache loads whose bytes were not those that were sealed.

    `left`: rooms that had not ended by the deadline. `aborts`: requests aborted on purpose. `edges`: violated
    edges of happens-before that the engines' traces show, with their counts.
    """

    asked: Sequence[Asked]
    rooms: Mapping[str, Mapping[str, Any]]
    left: Sequence[str]
    aborts: int
    edges: Mapping[str, int]
    host_tokens: int
    seconds: float
    loads_differ: Mapping[str, int] = {}
    stormed: Stormed | None = None
    traced: Traced | None = None
    retractions: int = 0


class RowResult(msgspec.Struct, kw_only=True):
    """One row of the table, as `--json` prints it.

    `corrupted`: sessions with an output that is not the oracle's. `digest_mismatches`: rooms whose bytes were not
    the oracle's where they were sealed, or not the sealed ones where they landed; `pools` names which, with the
    number of rooms. `failed`: requests that ended with an error; `stuck`: requests and rooms that did not end.
    """

    name: str
    group: str
    index_k: str
    hicache: bool
    topology: str
    guards: str
    waves: bool
    sessions: int
    requests: int
    corrupted: int
    wrong_outputs: int
    failed: int
    stuck: int
    digest_mismatches: int
    pools: dict[str, int]
    loads_differ: dict[str, int]
    transfer_timeouts: int
    aborts: int
    retractions: int
    cached_share: float
    host_tokens: int
    tokens_per_s: float
    seconds: float
    edges: dict[str, int]
    errors: list[str]
    storm: Stormed | None = None  #: what came before the requests
    traced: Named | None = None  #: by the race detector; None: not asked for
    verdict: str = ""

    @property
    def damaged(self) -> bool:
        return bool(self.corrupted or self.digests_differ)

    @property
    def digests_differ(self) -> bool:
        return bool(self.digest_mismatches or self.loads_differ)


def evaluate(row: Row, sessions: int, expected: Mapping[tuple[int, int], Expected], measured: Measured) -> RowResult:
    """`expected` is by (session, round)."""
    asked = measured.asked
    answered = [one for one in asked if one.output_ids is not None]
    wrong = [one for one in answered if one.output_ids != expected[one.session, one.round].output_ids]
    right = {turn: one.sealed(row.deployment.topology) for turn, one in expected.items()}
    damaged = [pools for one in asked if (pools := _damaged_pools(one, right, measured.rooms))]
    prompt_tokens = sum(one.prompt_tokens for one in answered)
    cached = sum(_detail(one, measured.rooms).get("cached_tokens") or 0 for one in answered)
    result = RowResult(
        name=row.name,
        group=row.group,
        index_k=row.deployment.index_k,
        hicache=row.deployment.hicache,
        topology=row.deployment.topology,
        guards=row.guards,
        waves=row.waves,
        sessions=sessions,
        requests=len(asked),
        corrupted=len({one.session for one in wrong}),
        wrong_outputs=len(wrong),
        failed=sum(one.error is not None for one in asked) + (measured.stormed.failed if measured.stormed else 0),
        stuck=sum(one.output_ids is None and one.error is None for one in asked) + len(measured.left),
        digest_mismatches=len(damaged),
        pools=dict(sorted(Counter(pool for pools in damaged for pool in pools).items())),
        loads_differ=dict(sorted(measured.loads_differ.items())),
        transfer_timeouts=sum(_timed_out(room) for room in measured.rooms.values()),
        aborts=measured.aborts + (measured.stormed.aborted if measured.stormed else 0),
        retractions=measured.retractions,
        cached_share=round(cached / prompt_tokens, 4) if prompt_tokens else 0.0,
        host_tokens=measured.host_tokens,
        tokens_per_s=round(sum(len(one.output_ids or ()) for one in answered) / measured.seconds, 1),
        seconds=round(measured.seconds, 2),
        edges=dict(sorted(measured.edges.items())),
        storm=measured.stormed,
        traced=_named(
            row, wrong, [one for one in asked if _damaged_pools(one, right, measured.rooms)], measured.traced
        ),
        errors=sorted({one.error for one in asked if one.error is not None})[:3],
    )
    result.verdict = verdict(result)
    return result


def _damaged_pools(
    asked: Asked,
    right: Mapping[tuple[int, int], Mapping[str, Sequence[int]]],
    rooms: Mapping[str, Mapping[str, Any]],
) -> set[str]:
    """Pools whose folded digests differ from the oracle's as sealed, or from the sealed ones as landed."""
    detail = _detail(asked, rooms)
    sealed: Mapping[str, Sequence[int]] = detail.get("sealed") or {}
    turn = right[asked.session, asked.round]
    differing = {pool for pool, values in sealed.items() if list(values) != list(turn[pool])}
    return differing | set(detail.get("digest_mismatches") or ())


def _named(row: Row, wrong: Iterable[Asked], damaged: Iterable[Asked], traced: Traced | None) -> Named | None:
    if traced is None:
        return None
    rooms = {one.room for one in (*wrong, *damaged) if one.room is not None}
    consumer = next((g.consumer.value for g in Guard if g.value == row.guards and g.consumer), "")
    named = sum(consumer in traced.behind.get(room, ()) for room in rooms)
    return Named(traced.races, len(rooms), named, traced.gaps)


def _detail(asked: Asked, rooms: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    room = rooms.get(asked.room) if asked.room is not None else None
    return room["detail"] if room is not None else {}


def _timed_out(room: Mapping[str, Any]) -> bool:
    return (room["state"], room["source"]) == (RoomState.ABORTED.value, AbortSource.DEADLINE.value)


def verdict(result: RowResult) -> str:
    """The row in words, no more than was seen."""
    broken = [f"{result.stuck} stuck"] if result.stuck else []
    broken += [f"{result.failed} failed"] if result.failed else []
    if result.damaged:
        named = " ".join(f"{pool}:{rooms}" for pool, rooms in result.pools.items()) or "none"
        loaded = " ".join(f"{pool}:{layers}" for pool, layers in result.loads_differ.items())
        share = f"{result.corrupted} of {result.sessions} conversations wrong"
        return "; ".join(
            [f"damage: {share}; digests name {named}", *([f"in loads {loaded}"] if loaded else []), *broken]
        )
    if result.guards == "on":
        return "; ".join(broken) or "clean"
    tries = f"{result.aborts} aborts" if result.waves or result.storm else f"{result.requests} requests"
    edges = ", ".join(f"{edge} ({count}x)" for edge, count in result.edges.items())
    shown = f"damage: {'; '.join(broken)} in {tries}" if broken else f"not provoked in {tries}"
    return f"{shown}; edge violated: {edges or 'none'}"


# ---- the whole run ------------------------------------------------------------------------------------


def problems(rows: Sequence[tuple[Row, RowResult]]) -> list[str]:
    """Why the run did not show what it must; empty if it did."""
    found = []
    for row, result in rows:
        if row.guarded:
            counts = {
                "corrupted": result.corrupted,
                "stuck": result.stuck,
                "failed": result.failed,
                "digest mismatches": result.digest_mismatches,
                "pages left": result.storm.pages_left if result.storm else 0,
                "races": result.traced.races if result.traced else 0,
            }
            bad = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            if bad:
                found.append(f"{result.name}: guards on, and yet {bad}")
            if row.must_retract and not result.retractions:
                found.append(f"{result.name}: no room was retracted in {result.requests} requests")
        elif row.must_stick and not result.stuck:
            found.append(f"{result.name}: {result.guards} off, and nothing was stuck in {result.requests} requests")
        elif row.must_damage and not (result.corrupted and result.digests_differ):
            found.append(f"{result.name}: {result.guards} off showed no damage in {result.requests} requests")
    return found


class Comparison(msgspec.Struct):
    """Two rows that differ in one thing, and how many of their conversations and answers were wrong.

    `p`: Fisher's exact test, two-sided, on conversations (answers of one conversation depend on each other).
    """

    what: str
    rows: tuple[str, str]
    corrupted: tuple[int, int]
    sessions: tuple[int, int]
    wrong_outputs: tuple[int, int]
    requests: tuple[int, int]
    p: float

    def __str__(self) -> str:
        conversations = _against(self.corrupted, self.sessions)
        if not any(self.corrupted):
            return f"{self.what}: {conversations} conversations wrong: not provoked"
        seen = f"p = {self.p:.2g}" + ("" if self.p < _SHOWN else ": no difference shown")
        answers = _against(self.wrong_outputs, self.requests)
        return f"{self.what}: {conversations} conversations wrong ({seen}), {answers} answers"


_SHOWN = 0.05


def comparisons(results: Iterable[RowResult]) -> list[Comparison]:
    """bf16 against fp8, and PD against one server, wherever both rows ran and nothing else differs."""
    table = {(r.index_k, r.hicache, r.topology, r.guards): r for r in results if not r.waves and not r.group}
    found = []
    for (index_k, hicache, topology, guards), left in table.items():
        cache = f"HiCache {'on' if hicache else 'off'}, {'guards on' if guards == 'on' else f'{guards} off'}"
        if index_k == "bf16" and (right := table.get(("fp8", hicache, topology, guards))):
            found.append(_compare(f"bf16 against fp8 ({topology}, {cache})", left, right))
        if topology == "pd" and (right := table.get((index_k, hicache, "single", guards))):
            found.append(_compare(f"PD against one server ({index_k}, {cache})", left, right))
    return found


def _compare(what: str, left: RowResult, right: RowResult) -> Comparison:
    corrupted, sessions = (left.corrupted, right.corrupted), (left.sessions, right.sessions)
    return Comparison(
        what=what,
        rows=(left.name, right.name),
        corrupted=corrupted,
        sessions=sessions,
        wrong_outputs=(left.wrong_outputs, right.wrong_outputs),
        requests=(left.requests, right.requests),
        p=round(fisher(corrupted, sessions), 4),
    )


def _against(counts: tuple[int, int], of: tuple[int, int]) -> str:
    return " against ".join(f"{count} of {total}" for count, total in zip(counts, of, strict=True))


def fisher(hits: tuple[int, int], tries: tuple[int, int]) -> float:
    """Two-sided p of Fisher's exact test: the chance of a split at least as uneven, if both rows were alike."""
    total, all_tries = sum(hits), sum(tries)
    ways = [comb(tries[0], k) * comb(tries[1], total - k) for k in range(total + 1)]
    return min(1.0, sum(way for way in ways if way <= ways[hits[0]]) / comb(all_tries, total))
