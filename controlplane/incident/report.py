"""The outcome of a run as one JSON object, and as text for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dsv4ctl.controlplane.admin.table import pairs, table
from dsv4ctl.controlplane.incident.evaluate import Comparison, RowResult

#: Where the ratio of copy time to layer time comes from: the engine's own words.
PACING_SOURCE = (
    "one layer of an 8-page prefix takes as long to copy as one layer of a 256-token chunk takes to compute "
    "(engine_adapters/reference/copies.py: paced_gbps). DeepSeek-V4-Flash: 312 pages of an 80K-token prefix, "
    "53,824 B a ratio-4 layer, over 53 GB/s host to device shared with the host are 0.3 to 0.6 ms; a layer of a "
    "256-token chunk is about 0.4 ms (155 GFLOP at 400 TFLOP/s)"
)
_HEADER = (
    "row", "index_k", "hicache", "topology", "guards", "corrupted", "stuck", "failed", "digests differ", "time-outs",
    "aborts", "retracted", "cached", "tok/s", "verdict",
)  # fmt: skip


class Pacing(msgspec.Struct):
    """`h2d_gbps`: GB/s of the paced link by deployment. `copy_to_layer_time`: of an 8-page prefix's layer."""

    h2d_gbps: dict[str, float]
    copy_to_layer_time: float = 1.0
    source: str = PACING_SOURCE


class Report(msgspec.Struct, kw_only=True):
    """`cost`: None where it was not measured (`--quick`, `--only`). `problems`: why the exit code is 1."""

    rows: list[RowResult]
    comparisons: list[Comparison]
    seed: int
    sessions: int
    rounds: int
    index_topk: int | None  #: None if no deployment was ever up
    pacing: Pacing
    cost: dict[str, Any] | None
    versions: dict[str, str]
    seconds: float
    problems: list[str]


def as_json(report: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def as_text(report: Report) -> str:
    head = f"{report.sessions} sessions x {report.rounds} rounds, seed {report.seed}, {report.seconds:.0f} s"
    model = f"random weights: its text is gibberish; top-{report.index_topk} of the index keys"
    parts = [
        f"{head}\n{model}",
        rows_table(report.rows),
        _section("reloaded by HiCache, tokens", {row.name: row.host_tokens for row in report.rows}),
    ]
    violated = {row.name: row.edges for row in report.rows if row.edges}
    if violated:
        parts.append(_section("edges that the trace shows violated", violated))
    storms = {
        row.name: f"{row.storm.aborted} of {row.storm.rooms} ended, all gone in {row.storm.seconds:g} s,"
        f" {row.storm.pages_left} pages left"
        for row in report.rows
        if row.storm
    }
    if storms:
        parts.append(_section("storms", storms))
    traced = {
        row.name: f"{row.traced.races} races; {row.traced.named} of {row.traced.corrupted} corrupted rooms traced back"
        for row in report.rows
        if row.traced
    }
    if traced:
        parts.append(_section("race detector", traced))
    failed = {row.name: "; ".join(row.errors) for row in report.rows if row.errors}
    if failed:
        parts.append(_section("errors", failed))
    if report.comparisons:
        parts.append("comparisons\n" + "\n".join(f"  {one}" for one in report.comparisons))
    if report.cost is not None:
        parts.append(cost_lines(report.cost))
    speeds = ", ".join(f"{gbps * 1000:.1f} MB/s ({name})" for name, gbps in report.pacing.h2d_gbps.items())
    if speeds:
        parts.append(f"host-to-device copies are paced at {speeds}:\n  {report.pacing.source}")
    parts.append(" ".join(f"{name} {version}" for name, version in report.versions.items()))
    parts += [f"NOT SHOWN: {problem}" for problem in report.problems]
    return "\n\n".join(parts)


def rows_table(rows: Sequence[RowResult]) -> str:
    lines = [
        (
            row.name,
            row.index_k,
            "on" if row.hicache else "off",
            row.topology,
            "on" if row.guards == "on" else f"{row.guards} off",
            f"{row.corrupted}/{row.sessions}",
            row.stuck,
            row.failed,
            row.digest_mismatches,
            row.transfer_timeouts,
            row.aborts,
            row.retractions,
            f"{100 * row.cached_share:.0f}%",
            row.tokens_per_s,
            row.verdict,
        )
        for row in rows
    ]
    return table(_HEADER, lines, "no rows")


def cost_lines(cost: Mapping[str, Any]) -> str:
    """Ratios of throughput, medians of interleaved repeats."""
    landed = _against_goal(cost["on_to_off_landed"], cost["on_to_off_landed_goal"])
    layers = _against_goal(cost["layers_to_whole"], cost["layers_to_whole_goal"])
    repeats = f"{cost['repeats']} and {cost['loading_repeats']}"
    return "\n".join(
        [
            f"cost of the guards (throughput, medians of {repeats} interleaved repeats)",
            f"  guards on to tickets off, all loads landed: {landed}",
            f"  guards on to waiting for the whole load: {layers}",
            f"  tickets off to guards on, while loading (its outputs are wrong): {cost['ungated_to_layers']:.3f}",
        ]
    )


def _against_goal(ratio: float, goal: float) -> str:
    return f"{ratio:.3f} (goal {goal:g}: {'reached' if ratio >= goal else 'missed'})"


def _section(title: str, values: Mapping[str, Any]) -> str:
    return title + "\n" + "\n".join(f"  {line}" for line in pairs(values).splitlines())
