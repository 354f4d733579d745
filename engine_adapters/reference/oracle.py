"""The oracle: the same model, one request at a time, private pools, no cache. What the engines must equal.

As a program it answers JSON lines {"id", "input_ids", "max_new_tokens"} from stdin with lines
{"id", "output_ids", "digests", "folded", "folded_full_pages"} on stdout, so that a process without torch can ask it;
a bad line is answered with {"id", "error"}. `digests` are the prompt's pages as sealed, `folded` their fold in
logical order, `folded_full_pages` that of the pages which the prompt fills (a single engine seals no others).
EOS does not end an answer there (`--stop-at-eos` makes it).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from dsv4ctl.engine_adapters.reference.digests import PageDigests, digest_page, fold_pages
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.model import Model
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.engine_adapters.reference.sequence import PageTable, chunk_spans, make_chunk, open_gate
from dsv4ctl.engine_adapters.reference.tokenizer import EOS


@dataclass(frozen=True)
class OracleRun:
    """`tokens`: the greedy answer. `pages`: digests of the prompt's pages as sealed."""

    tokens: list[int]
    pages: list[PageDigests]


class Oracle:
    """Answers requests one at a time; every request gets fresh pools."""

    def __init__(self, geometry: Geometry, seed: int, device: str = "cpu") -> None:
        self.model = Model(geometry, seed, device=device)

    def generate(self, ids: Sequence[int], max_new_tokens: int, ignore_eos: bool = True) -> OracleRun:
        """Prefill `ids`, then decode greedily: `max_new_tokens` tokens, fewer at EOS unless `ignore_eos`.

        An EOS that ends the answer is its last token. Raises ValueError for a prompt that is empty, has
        unknown tokens or does not fit the context together with its answer.
        """
        geometry = self.model.geometry
        check_request(geometry, ids, max_new_tokens)
        pools, table = private_pools(geometry, len(ids) + max_new_tokens, self.model.device)
        pages: list[PageDigests] = []
        token = -1
        for start, end in chunk_spans(geometry, 0, len(ids)):
            chunk = make_chunk(pools, ids[start:end], start, table)
            hidden = self.model.forward(chunk, open_gate)
            token = self.model.next_token(hidden)
            pages.append(digest_page(pools, chunk.page, end, table))
        tokens = [token]
        while len(tokens) < max_new_tokens and (ignore_eos or tokens[-1] != EOS):
            chunk = make_chunk(pools, tokens[-1:], len(ids) + len(tokens) - 1, table)
            tokens.append(self.model.next_token(self.model.forward(chunk, open_gate)))
        return OracleRun(tokens, pages)


def check_request(geometry: Geometry, ids: Sequence[int], max_new_tokens: int) -> None:
    """Raise ValueError, saying what would be right, for a request the model cannot answer."""
    if not ids:
        raise ValueError("the prompt is empty: at least one token expected")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens}: 1 or more expected")
    unknown = [token for token in ids if not 0 <= token < geometry.vocab]
    if unknown:
        raise ValueError(f"token {unknown[0]} is unknown: 0 to {geometry.vocab - 1} expected")
    total = len(ids) + max_new_tokens
    if total > geometry.context_tokens:
        raise ValueError(f"{len(ids)} + {max_new_tokens} tokens: at most {geometry.context_tokens} fit the context")


def private_pools(geometry: Geometry, tokens: int, device: str | torch.device = "cpu") -> tuple[DevicePools, PageTable]:
    """Pools for one sequence of at most `tokens` tokens, and its table (all pages, no sharing)."""
    count = geometry.pages_for(tokens)
    pools = DevicePools(geometry, {"full": count, "swa": count, "state": 1}, device)
    return pools, PageTable(full=list(range(count)), swa={page: page for page in range(count)}, state=0)


def layer_seconds(model: Model, context: int = 1024, repeats: int = 5) -> list[float]:
    """Median seconds of each layer for a 256-token chunk that ends at `context` (a multiple of 256)."""
    pools, table = private_pools(model.geometry, context, model.device)
    spans = chunk_spans(model.geometry, 0, context)
    ids = [65 + token % 26 for token in range(model.geometry.page_tokens)]
    for start, _ in spans:
        chunk = make_chunk(pools, ids, start, table)
        model.forward(chunk, open_gate)
    samples: list[list[float]] = []
    for _ in range(repeats):
        hidden, row = model.embed(chunk), []
        for layer in range(model.geometry.layers):
            began = time.perf_counter()
            hidden = model.forward_layer(layer, hidden, chunk, open_gate)
            row.append(time.perf_counter() - began)
        samples.append(row)
    return [sorted(layer)[repeats // 2] for layer in zip(*samples, strict=True)]


class _Question(msgspec.Struct):
    id: str | int
    input_ids: list[int]
    max_new_tokens: int


def answer_line(oracle: Oracle, line: bytes, ignore_eos: bool) -> bytes:
    """One JSON line in, one out (without the line feed)."""
    try:
        question = msgspec.json.decode(line, type=_Question)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return msgspec.json.encode({"id": None, "error": f"bad line: {error}"})
    try:
        run = oracle.generate(question.input_ids, question.max_new_tokens, ignore_eos)
    except ValueError as error:
        return msgspec.json.encode({"id": question.id, "error": str(error)})
    digests = [page.to_builtins() for page in run.pages]
    whole = len(question.input_ids) // oracle.model.geometry.page_tokens
    return msgspec.json.encode(
        {
            "id": question.id,
            "output_ids": run.tokens,
            "digests": digests,
            "folded": fold_pages(run.pages).to_builtins(),
            "folded_full_pages": fold_pages(run.pages[:whole]).to_builtins(),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="one-at-a-time oracle of the reference engine (JSON lines)")
    parser.add_argument("--geometry", default="{}", help="JSON object; fields left out have their defaults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="the engines' device: equal means equal"
    )
    parser.add_argument("--stop-at-eos", action="store_true")
    arguments = parser.parse_args()
    try:
        geometry = msgspec.json.decode(arguments.geometry, type=Geometry)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        parser.error(f"--geometry: {error}")
    oracle = Oracle(geometry, arguments.seed, arguments.device)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer_line(oracle, line, not arguments.stop_at_eos) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
