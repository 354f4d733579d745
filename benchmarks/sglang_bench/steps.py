"""What is measured, in which call: the steps of each group in their order, each with its own deadline."""

from __future__ import annotations

from typing import NamedTuple

#: Seconds that servers may take to come up, and the first requests after that: kernels are compiled or loaded.
START, FIRST = 170.0, 150.0


class Step(NamedTuple):
    seconds: float  #: at most
    usual: float  #: what it took, or is expected to take, on an H200
    shows: str


class Group(NamedTuple):
    cards: str
    seconds: float  #: budget of the whole; a call has 600
    usual_start: float
    steps: dict[str, Step]


GROUPS = {
    "outputs": Group(
        "one",
        540.0,
        60.0,
        {
            "s1.lengths": Step(60.0, 26.0, "outputs, one request at a time, against one server without a cache"),
            "s1.sessions": Step(100.0, 70.0, "48 sessions of 3 turns at once, twice with hooks and twice without"),
            "s4.sessions": Step(110.0, 60.0, "the sessions with bf16 index keys, twice, against their own oracle"),
            "s3.aborts.hooks_on": Step(85.0, 64.0, "10 waves of 80 requests, half of them left"),
            "s3.frames.hooks_on": Step(30.0, 3.0, "malformed frames to the bootstrap port"),
            "s3.decode_killed": Step(130.0, 40.0, "decode killed with SIGKILL"),
            "s3.aborts.hooks_off": Step(60.0, 26.0, "4 waves without hooks"),
            "s3.frames.hooks_off": Step(40.0, 25.0, "malformed frames without hooks"),
            "trace.on": Step(25.0, 2.0, "counters, and the race detector over what the ranks recorded"),
            "drain": Step(30.0, 5.0, "`dsv4ctl drain`"),
        },
    ),
    "early": Group(
        "one",
        540.0,
        60.0,
        {
            "s2.early_send": Step(155.0, 140.0, "early sends of loading pages, hooks on and off, byte by byte"),
            "s2.digests": Step(95.0, 60.0, "the sender's ticket switched off: digests catch what is sent too early"),
            "trace.early-on": Step(25.0, 2.0, "counters and race detector"),
            "s3.prefill_killed": Step(130.0, 45.0, "prefill killed with SIGKILL, while the bf16 engines start"),
            "s4.lengths": Step(50.0, 9.0, "outputs with bf16 index keys against their own oracle"),
            "s4.early_send": Step(65.0, 43.0, "early sends of bf16 pages"),
            "trace.bf16": Step(25.0, 2.0, "counters and race detector"),
        },
    ),
    "steady": Group(
        "two, or one",
        560.0,
        5.0,
        {
            "s5.own": Step(240.0, 125.0, "what of a turn of a scheduler's loop is our own code, by hook"),
            "s5.steady": Step(555.0, 330.0, "tokens/s of 32 at a time, hooks on and off, of 16 starts: 4 to 6 a call"),
        },
    ),
    "cost": Group(
        "two, or one",
        400.0,
        100.0,
        {
            "s5.cost": Step(90.0, 65.0, "tokens/s of bursts of 32, hooks on and off, and their first tokens"),
            "s5.hicache": Step(90.0, 55.0, "HiCache on and off: prompts that are new, and that come again"),
            "s5.index_k": Step(60.0, 45.0, "bf16 and fp8 index keys in turns"),
        },
    ),
    "ranks": Group(
        "two or more",
        550.0,
        60.0,
        {
            "tp.lengths": Step(70.0, 50.0, "outputs of four pairs against the oracles of their index keys"),
            "tp.aborts.on": Step(180.0, 155.0, "20 waves, three quarters left; what each rank did"),
            "tp.aborts.bf16": Step(180.0, 155.0, "the same with bf16 index keys and no overlap schedule"),
            "tp.aborts.off": Step(180.0, 155.0, "the same without hooks"),
            "tp.one_verdict.on": Step(70.0, 20.0, "one rank alone: wrong digest, wrong metadata, failed transfer"),
            "trace.tp-on": Step(25.0, 2.0, "counters and race detector"),
            "tp.rank_stopped": Step(170.0, 110.0, "a decode rank stopped with SIGSTOP, until it serves again"),
            "tp.one_verdict.off": Step(45.0, 45.0, "wrong metadata on one rank, no hooks: it may hang"),
            "drain": Step(30.0, 5.0, "`dsv4ctl drain`"),
        },
    ),
}
#: Steps that run beside the one before them, and cost no time of their own.
BESIDE = {
    "s3.aborts.hooks_off",
    "s3.frames.hooks_off",
    "s4.lengths",
    "s4.early_send",
    "tp.aborts.bf16",
    "tp.aborts.off",
}
#: What is given as arguments in each call; groups of one call run beside each other, a card each.
CALLS = (
    (("outputs", "--group outputs --gpu 0"), ("early", "--group early --gpu 1")),
    (("ranks", "--tp 2"),),
    # With nothing beside them; engines of one card wait for each other's kernels.
    (("steady", "--group steady --gpu 0,1 --resume"),),
    (("cost", "--group cost --gpu 0,1"),),
)


def usual(group: str) -> float:
    """Seconds that the group is expected to take."""
    steps = GROUPS[group].steps.items()
    return GROUPS[group].usual_start + sum(step.usual for name, step in steps if name not in BESIDE)


def plan() -> str:
    """The calls, in order: each fits in ten minutes, and what it did not get to is made up for with --resume."""
    lines: list[str] = []
    for number, call in enumerate(CALLS, 1):
        seconds = max(GROUPS[group].seconds for group, _ in call)
        expected = max(usual(group) for group, _ in call)
        lines.append(f"call {number}: {len(call)} at once, at most {seconds:.0f} s, expected {expected:.0f} s")
        for group, arguments in call:
            lines.append(f"  h200_sglang {arguments}  (cards: {GROUPS[group].cards})")
            for name, step in GROUPS[group].steps.items():
                beside = " beside" if name in BESIDE else ""
                lines.append(f"    {name:20} {step.usual:4.0f} s{beside}, at most {step.seconds:.0f} s: {step.shows}")
    lines.append(
        "On one card: the groups of call 1 one after another. A call cut short: again, on the same file of results, "
        "with --resume, which leaves out steps that are done."
    )
    return "\n".join(lines)
