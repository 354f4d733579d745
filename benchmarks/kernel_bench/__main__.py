"""`python -m kernel_bench [--seconds N] [--tune] FILE`: all sections, or those named by --only, into FILE."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from kernel_bench import accuracy, acquire, correct, floors, indexer, moves
from kernel_bench.harness import Report


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_kernels", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=480.0, help="sections that would begin later are left out")
    parser.add_argument("--tune", action="store_true", help="also time other launch shapes of the logits")
    parser.add_argument("--only", default="", help="sections, comma separated (floors are always measured)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kernels needs a GPU that PyTorch can use", file=sys.stderr)
        return 2
    torch.manual_seed(1)
    report = Report(options.file, time.monotonic() + options.seconds)
    sections = {
        "correct": correct.check,
        "topk": indexer.topk,
        "decode": indexer.decode,
        "digest": moves.digests,
        "copies": moves.copies,
        "tickets": acquire.check,
        "prefill": indexer.prefill,
        "store": moves.store,
        "accuracy": accuracy.measure,
    }
    if options.tune:
        sections |= {"tune_logits": indexer.tune, "tune_topk": indexer.tune_topk, "tune_digest": moves.tune_digests}
    wanted = set(options.only.split(",")) if options.only else set(sections)
    report.section("floors", floors.measure)
    for name, run in sections.items():
        if name in wanted:
            report.section(name, run)
    missed = [row for row in report.rows if row.met is False]
    print(f"{len(report.rows)} rows, {len(missed)} goals missed, written to {options.file}")
    return int(any(row.section == "correct" for row in missed))


if __name__ == "__main__":
    sys.exit(main())
