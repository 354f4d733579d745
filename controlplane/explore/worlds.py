"""The worlds that are explored: quick ones for every run of the tests, deep ones on demand."""

from __future__ import annotations

from dsv4ctl.controlplane.explore.cache import Cache, CachePlan
from dsv4ctl.controlplane.explore.plan import Plan
from dsv4ctl.controlplane.explore.rank import Setup
from dsv4ctl.controlplane.explore.search import World
from dsv4ctl.controlplane.explore.transfer import Transfer
from dsv4ctl.controlplane.tickets.types import Consumer

ONE = ((1, 1),)
RETRY = ((1, 1), (1, 2))
#: Time-outs come only when nothing else can happen, so that one that is needed without a fault is a violation.
PATIENT = Setup(hasty=False)
#: A rank remembers no end and no abort of a room that it does not know.
FORGETFUL = Setup(pages=1, wants=1, hasty=False, remembered=0)
#: One page a rank, whose digest is compared before it is read.
VERIFIED = Setup(pages=1, wants=1, verify=True, hasty=False)
TWO_BY_TWO = Plan("two rooms of two ranks a side", prefill=2, decode=2, aborts=0, setup=PATIENT, eager=True)
ONE_BY_ONE = TWO_BY_TWO._replace(prefill=1, decode=1)
#: Every kind of fault but a broken connection, two of them in any order.
ANY_TWO = Plan(
    "two rooms, any two faults",
    link_faults=1,
    peer_faults=1,
    crashes=1,
    poisons=1,
    restarts=1,
    at_most=2,
    setup=PATIENT,
    eager=True,
)
ATTENTION, SENDER = (Consumer.ATTENTION,), (Consumer.SENDER,)

QUICK: tuple[Plan | CachePlan, ...] = (
    Plan("early time-outs", rooms=ONE),
    Plan("verdict", rooms=ONE, setup=Setup(verify=True)),
    Plan("write without an end", rooms=ONE, poisons=1, restarts=1),
    Plan("link faults", rooms=ONE, link="down", link_faults=1, setup=PATIENT),
    Plan("openings in order", rooms=ONE, link="down", in_order=True, setup=PATIENT),
    Plan("openings in order, reports too", rooms=ONE, link="both", in_order=True, aborts=0, setup=PATIENT),
    Plan("openings in order, crash", link="down", in_order=True, aborts=0, crashes=1, restarts=1, setup=PATIENT),
    Plan("broken connections", rooms=ONE, aborts=2, breaks=2, setup=PATIENT),
    Plan("write without an end, aborted late", rooms=ONE, link="down", poisons=1, aborts=0, setup=PATIENT),
    Plan("peer faults", rooms=ONE, peer_faults=1, setup=PATIENT),
    Plan("no memory", rooms=ONE, breaks=1, poisons=1, setup=FORGETFUL),
    Plan("no memory, link faults", rooms=ONE, link="down", link_faults=1, abort_by=("P",), setup=FORGETFUL),
    Plan("memory of one room", link="down", link_faults=2, aborts=0, setup=FORGETFUL._replace(remembered=1)),
    Plan("crash and restart", aborts=0, crashes=1, restarts=1, setup=PATIENT),
    Plan("one writer, two ranks that read", rooms=ONE, decode=2, fan=True, abort_by=("D",), setup=PATIENT, eager=True),
    ANY_TWO._replace(name="one room, any two faults", rooms=ONE),
    Plan("a page reused", setup=Setup(pages=1, wants=1, hasty=False), abort_by=("D",)),
    CachePlan("cache: attention", consumers=ATTENTION, evictions=1, aborts=0),
    CachePlan("cache: sender", consumers=SENDER, evictions=1),
    CachePlan("cache: bad copies", consumers=ATTENTION, evictions=1, aborts=0, bad_copies=1),
    CachePlan("cache: stranger", device=1, consumers=ATTENTION, evictions=1, aborts=0, stranger=True),
    CachePlan("cache: slips", consumers=ATTENTION, evictions=0, aborts=0, slips=1),
)

DEEP: tuple[Plan | CachePlan, ...] = (
    Plan("two rooms, three pages", setup=PATIENT),
    Plan("two rooms, early time-outs", aborts=0),
    Plan("two rooms, two aborts", aborts=2, setup=Setup(pages=2, hasty=False)),
    Plan("no memory, link faults, any abort", rooms=ONE, link="down", link_faults=1, setup=FORGETFUL),
    Plan("openings of two rooms in order", link="down", in_order=True, setup=PATIENT),
    Plan("two pages a room", rooms=ONE, setup=Setup(wants=3, prompt=2)),
    Plan("a room again", rooms=RETRY, one_by_one=True, peer_faults=1, setup=PATIENT),
    Plan("crash, abort and broken connection", rooms=ONE, crashes=1, breaks=1, restarts=1),
    Plan("crash and write without an end", crashes=1, poisons=1, restarts=2, aborts=0, setup=PATIENT),
    Plan("two engines of two ranks", rooms=ONE, prefill=2, decode=2, crashes=1, restarts=1, setup=PATIENT),
    TWO_BY_TWO._replace(name="two rooms of two ranks a side, abort", aborts=1),
    TWO_BY_TWO._replace(name="two rooms of two ranks a side, crash", crashes=1, restarts=1),
    TWO_BY_TWO._replace(name="two rooms of two ranks a side, write without an end", poisons=1, restarts=1),
    TWO_BY_TWO._replace(name="two rooms of two ranks a side, abort and crash", aborts=1, crashes=1, restarts=1),
    TWO_BY_TWO._replace(name="two rooms of two ranks a side, abort, fault between ranks", aborts=1, peer_faults=1),
    TWO_BY_TWO._replace(
        name="two rooms of two ranks a side, crash, fault between ranks", crashes=1, restarts=1, peer_faults=1
    ),
    TWO_BY_TWO._replace(name="two rooms of two ranks a side, abort, link struck", aborts=1, link_faults=1),
    TWO_BY_TWO._replace(
        name="two rooms of two ranks a side, abort, write without an end", aborts=1, poisons=1, restarts=1
    ),
    TWO_BY_TWO._replace(name="two rooms of two ranks a side, crash, link struck", crashes=1, restarts=1, link_faults=1),
    TWO_BY_TWO._replace(name="one room of two ranks a side, link struck", rooms=ONE, aborts=1, link_faults=1),
    ONE_BY_ONE._replace(name="two rooms, abort, link struck", aborts=1, link_faults=1),
    ONE_BY_ONE._replace(
        name="two rooms, abort, crash, fault between ranks", aborts=1, crashes=1, restarts=1, peer_faults=1
    ),
    ANY_TWO,
    ANY_TWO._replace(name="one room of two ranks a side, any two faults", prefill=2, decode=2, rooms=ONE),
    TWO_BY_TWO._replace(name="a page of two ranks reused", aborts=1, abort_by=("client",), setup=VERIFIED),
    TWO_BY_TWO._replace(name="each of two ranks with each", rooms=ONE, fan=True, aborts=1, crashes=1, restarts=1),
    Plan("two readers of one writer", rooms=ONE, decode=2, fan=True, peer_faults=1, setup=PATIENT),
    Plan("two writers of one reader", rooms=ONE, prefill=2, fan=True, peer_faults=1, setup=PATIENT),
    CachePlan("cache: three pages", device=3, bad_copies=1),
    CachePlan("cache: three rooms", rooms=3, consumers=ATTENTION, evictions=1, aborts=0),
)

#: Small worlds in which one seeded fault shows, beside those above.
SEEDED: tuple[Plan | CachePlan, ...] = (
    Plan("a room again, aborted", rooms=RETRY, one_by_one=True, peer_faults=1, abort_by=("D",), setup=PATIENT),
    Plan("fan in", rooms=ONE, prefill=2, fan=True, abort_by=("D",), setup=PATIENT),
    Plan("repeated acks", rooms=ONE, prefill=2, fan=True, peer_faults=1, abort_by=("D",), setup=PATIENT),
    Plan("two aborts, one overtakes", link="down", link_faults=1, aborts=2, abort_by=("client",), setup=PATIENT),
    Plan("crash", rooms=ONE, crashes=1, aborts=0, setup=PATIENT),
    Plan("failed writes", rooms=ONE, poisons=1, aborts=0, setup=PATIENT),
)

PLANS = {plan.name: plan for plan in (*QUICK, *DEEP, *SEEDED)}


def world(plan: Plan | CachePlan) -> World:
    return Transfer(plan) if isinstance(plan, Plan) else Cache(plan)
