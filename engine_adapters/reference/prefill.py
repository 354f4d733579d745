"""The prefill half of a step: admission with the prefix cache and HiCache, page-sized chunks, sealing, hand-over."""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.types import HOST, Consumer, Extent, LoadKind
from dsv4ctl.engine_adapters.agent import Agent
from dsv4ctl.engine_adapters.reference.cache import Node, PrefixCache
from dsv4ctl.engine_adapters.reference.digests import PageDigests, digest_page, fold_pages
from dsv4ctl.engine_adapters.reference.facts import Budget
from dsv4ctl.engine_adapters.reference.geometry import SPACES
from dsv4ctl.engine_adapters.reference.hicache import BackupJob, HiCache, LoadJob, Piece
from dsv4ctl.engine_adapters.reference.peer_wire import Manifest
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.engine_adapters.reference.readiness import Landing, ReadinessWords
from dsv4ctl.engine_adapters.reference.sender import SealedChunk
from dsv4ctl.engine_adapters.reference.sequence import Chunk, make_chunk
from dsv4ctl.engine_adapters.reference.sequences import ATTENTION_POOLS, INDEXER_POOLS, Sequence
from dsv4ctl.engine_adapters.reference.verdicts import verdict
from dsv4ctl.policies.hicache import HiCache as HiCachePolicy
from dsv4ctl.policies.integrity import Verdict

#: Within a layer, the spaces of a HiCache load land in this order.
LOAD_ORDER = ("state", "swa", "full")


class Outbox(Protocol):
    """What prefill hands to the transfer half."""

    def chunk(self, key: RoomKey, chunk: SealedChunk) -> None: ...

    def finish(self, key: RoomKey, manifest: Manifest) -> None: ...


class Prefill:
    """`outbox` None: a single engine, which goes on to decode where it stands. `words`: readers wait on the device."""

    def __init__(
        self,
        agent: Agent,
        pools: DevicePools,
        cache: PrefixCache,
        hicache: HiCache | None,
        policy: HiCachePolicy,
        outbox: Outbox | None,
        words: ReadinessWords | None = None,
    ) -> None:
        self._agent = agent
        self._gate: Gate = agent.gate
        self._pools = pools
        self._page_tokens = pools.geometry.page_tokens
        self._cache = cache
        self._hicache = hicache
        self._policy = policy
        self._outbox = outbox
        self._words = words

    # ---- admission -----------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, budget: Budget, jobs: list[LoadJob]) -> bool:
        """Gives the sequence its pages, loads and tickets, all or nothing; False if there is no room yet.

        Its HiCache load is added to `jobs`: the loads of one step run as one. Raises Refusal or
        UnknownRoomError, with everything taken, if the room is over on this rank.
        """
        if not self._allocate(sequence, budget, jobs):
            return False
        self._agent.apply(sequence.key, lambda half: half.forward_begin())
        self._send_cached(sequence)
        return True

    def _allocate(self, sequence: Sequence, budget: Budget, jobs: list[LoadJob]) -> bool:
        path = self._usable(sequence)
        first, pages = len(path), -(-self._tokens_to_hold(sequence) // self._page_tokens)
        sealing = sequence.prompt // self._page_tokens - first
        loading = {
            "full": [node for node in path if "full" not in node.device],
            "swa": [node for node in path[-1:] if "swa" not in node.device],
            "state": [node for node in path[-1:] if "state" not in node.device],
        }
        wants = {
            "full": pages - first + len(loading["full"]),
            "swa": pages - first + len(loading["swa"]),
            "state": 1 + sealing + len(loading["state"]),
        }
        self._cache.pin(path)
        self._cache.evict_device(wants, budget)
        if not budget.take(wants):
            self._cache.unpin(path)
            return False
        taken = self._gate.allocate(wants)
        assert taken is not None, "every rank has what all agreed on"
        left = {space: list(pages) for space, pages in taken.items()}
        if any(loading.values()):
            wanted = {s: (n, [left[s].pop() for _ in n]) for s, n in loading.items() if n}
            jobs.append(self._open_load(sequence, path, wanted))
        sequence.path = path
        sequence.owned = {space: set(pages) for space, pages in left.items()}
        sequence.cached_tokens = sequence.computed = first * self._page_tokens
        sequence.host_tokens = len(loading["full"]) * self._page_tokens
        sequence.digests = [node.digests for node in path]
        self._fill_table(sequence, left)
        leased = [self._gate.extent(space, pages) for space, pages in left.items()]
        sequence.lease = self._gate.open_load(LoadKind.FORWARD, leased, room=sequence.key)
        self._take_tickets(sequence)
        self._agent.note(
            sequence.key,
            prompt_tokens=sequence.prompt,
            cached_tokens=sequence.cached_tokens,
            host_tokens=sequence.host_tokens,
        )
        self._agent.counters["host_tokens_loaded"] += sequence.host_tokens
        self._agent.counters["cached_tokens"] += sequence.cached_tokens
        self._agent.counters["prompt_tokens"] += sequence.prompt
        return True

    def _tokens_to_hold(self, sequence: Sequence) -> int:
        return sequence.prompt + (0 if self._outbox is not None else sequence.request.max_new_tokens)

    def _usable(self, sequence: Sequence) -> list[Node]:
        """The cached prefix; without host pages where HiCache is off or a load would not pay.

        Of a fresh room nothing is usable, and nothing of what was cached is believed any more.
        """
        path = self._cache.match(sequence.ids[: sequence.prompt])
        if sequence.opening.fresh:
            self._cache.forget(path)
            return []
        on_host = sum("full" not in node.device for node in path)
        if not on_host or (self._hicache is not None and self._policy.loads(on_host)):
            return path
        while path and (any("full" not in n.device for n in path) or any(s not in path[-1].device for s in SPACES)):
            path.pop()
        return path

    def _open_load(
        self, sequence: Sequence, path: list[Node], wanted: dict[str, tuple[list[Node], list[int]]]
    ) -> LoadJob:
        """Publishes the nodes as device pages that are still loading; their readers' tickets are pending."""
        host = {space: _merged([node.host[space] for node in nodes]) for space, (nodes, _) in wanted.items()}
        ticket = self._gate.request(Consumer.LOAD, list(host.values()))
        pieces = []
        for space in sorted(wanted, key=LOAD_ORDER.index):
            nodes, pages = wanted[space]
            load = self._gate.open_load(LoadKind.HICACHE, [self._gate.extent(space, pages)], verify=True)
            (target,) = load.extents
            pieces.append(Piece(load, host[space], target, tuple(nodes)))
            for node, page, generation in zip(nodes, target.pages, target.generations, strict=True):
                node.device[space] = replace(target, pages=(page,), generations=(generation,))
        loaded = tuple({id(node): node for piece in pieces for node in piece.nodes}.values())
        return LoadJob(ticket, tuple(pieces), loaded, sequence.key, verdict(sequence.opening) is not Verdict.NONE)

    def _fill_table(self, sequence: Sequence, left: dict[str, list[int]]) -> None:
        path, table = sequence.path, sequence.table
        table.full = [node.device["full"].pages[0] for node in path] + left["full"]
        table.swa = dict(enumerate(left["swa"], start=len(path)))
        if path:
            table.swa[path[-1].logical] = path[-1].device["swa"].pages[0]
            sequence.state_from = path[-1].device["state"].pages[0]
        table.state, *sequence.snapshots = left["state"]

    def _take_tickets(self, sequence: Sequence) -> None:
        if not sequence.path:
            return
        last = sequence.path[-1].device
        full = _merged([node.device["full"] for node in sequence.path])
        attention = replace(full, pools=frozenset(ATTENTION_POOLS))
        sequence.join(Consumer.ATTENTION, [attention, last["swa"]])
        sequence.join(Consumer.INDEXER, [replace(full, pools=frozenset(INDEXER_POOLS))])
        sequence.join(Consumer.COMPRESSOR, [last["state"]])

    # ---- chunks --------------------------------------------------------------------------------------

    def chunk(self, sequence: Sequence) -> Chunk:
        """The next page-sized piece of the prompt; the last one is as long as it is."""
        start = sequence.computed
        end = min(start + self._page_tokens, sequence.prompt)
        state_from = sequence.state_from if sequence.state_from is not None else sequence.table.state
        landing = self._landing(sequence, end)
        return make_chunk(self._pools, sequence.ids[start:end], start, sequence.table, state_from, landing)

    def _landing(self, sequence: Sequence, end: int) -> Landing | None:
        ticket = sequence.tickets.get(Consumer.INDEXER)
        if self._words is None or ticket is None:
            return None
        loading = self._gate.landing(ticket, LoadKind.HICACHE, "full")
        return self._words.landing(sequence.table.full[: -(-end // self._page_tokens)], loading)

    def computed(self, sequence: Sequence, end: int, budget: Budget) -> bool:
        """The chunk that ends at `end` is in the pools. True if it was the prompt's last."""
        logical = (end - 1) // self._page_tokens
        sequence.computed = end
        sequence.state_from = None
        sequence.leave(Consumer.COMPRESSOR)
        if end % self._page_tokens == 0:
            self._seal_page(sequence, logical, budget)
        elif self._outbox is not None:
            self._seal_tail(sequence, logical)
        return end == sequence.prompt

    def hand_over(self, sequence: Sequence, first_token: int) -> None:
        """The prompt is computed: the peer gets what it needs to go on, once everything is written."""
        assert self._outbox is not None
        manifest = Manifest(
            prompt_tokens=sequence.prompt,
            first_token=first_token,
            chunks=-(-sequence.prompt // self._page_tokens),
            cached_tokens=sequence.cached_tokens,
            host_tokens=sequence.host_tokens,
        )
        self._outbox.finish(sequence.key, manifest)

    def _seal_page(self, sequence: Sequence, logical: int, budget: Budget) -> None:
        """A full page, and the state at its end: sealed, digested, published, backed up, sent."""
        assert sequence.lease is not None
        table, snapshot = sequence.table, sequence.snapshots.pop()
        self._pools.copy_state(table.state, snapshot)
        pages = {"full": table.full[logical], "swa": table.swa[logical], "state": snapshot}
        for space, page in pages.items():
            self._gate.seal(sequence.lease, space, (page,))
        end = (logical + 1) * self._page_tokens
        digests = digest_page(self._pools, logical, end, table, state=snapshot)
        sequence.digests.append(digests)
        device = {space: self._gate.extent(space, (page,)) for space, page in pages.items()}
        self._publish(sequence, logical, device, digests, budget)
        sequence.join_sealed(logical)
        last = end == sequence.prompt
        if self._outbox is not None:
            state = self._seal_state(sequence) if last else None
            self._send(sequence, logical, device["full"], device["swa"], state)

    def _seal_tail(self, sequence: Sequence, logical: int) -> None:
        """The prompt's last, partly filled page is sealed at its length: it is about to be handed over."""
        assert sequence.lease is not None
        table = sequence.table
        full, swa = table.full[logical], table.swa[logical]
        self._gate.seal(sequence.lease, "full", (full,))
        self._gate.seal(sequence.lease, "swa", (swa,))
        sequence.digests.append(digest_page(self._pools, logical, sequence.prompt, table))
        state = self._seal_state(sequence)
        extents = self._gate.extent("full", (full,)), self._gate.extent("swa", (swa,))
        self._send(sequence, logical, *extents, state)

    def _seal_state(self, sequence: Sequence) -> Extent:
        assert sequence.lease is not None
        self._gate.seal(sequence.lease, "state", (sequence.table.state,))
        return self._gate.extent("state", (sequence.table.state,))

    def _publish(
        self,
        sequence: Sequence,
        logical: int,
        device: dict[str, Extent],
        digests: PageDigests,
        budget: Budget,
    ) -> None:
        parent = sequence.path[-1] if sequence.path else None
        if not sequence.publishes or (parent is not None and not parent.alive):
            sequence.publishes = False
            return
        key = self._cache.page_key(sequence.ids, logical)
        node, took = self._cache.insert(parent, key, device, digests)
        self._cache.pin([node])
        sequence.path.append(node)
        if took:
            for space, extent in device.items():
                sequence.owned[space].discard(extent.pages[0])
            self._back_up(node, budget)

    def _back_up(self, node: Node, budget: Budget) -> None:
        """Copies a freshly published page to the host; without room there it stays on the device only."""
        if self._hicache is None or node.host:
            return
        wants = {HOST + space: 1 for space in node.device}
        self._cache.evict_host(wants, budget)
        if not budget.take(wants):
            return
        pages = self._gate.allocate(wants)
        assert pages is not None, "every rank has what all agreed on"
        ticket = self._gate.request(Consumer.BACKUP, list(node.device.values()))
        pieces = []
        for space, extent in node.device.items():
            (page,) = pages[HOST + space]
            target = self._gate.extent(HOST + space, (page,), self._hicache.keeps(space, page, extent.pools))
            load = self._gate.open_load(LoadKind.BACKUP, [target])
            (node.host[space],) = load.extents
            pieces.append(Piece(load, node.host[space], extent, (node,)))
        self._hicache.back_up(BackupJob(ticket, tuple(pieces)))

    # ---- sending -------------------------------------------------------------------------------------

    def _send_cached(self, sequence: Sequence) -> None:
        """The cached prefix leaves as early as its tickets allow, before anything of this request is computed."""
        if self._outbox is None:
            return
        for node in sequence.path:
            self._send(sequence, node.logical, node.device["full"], node.device.get("swa"), None)

    def _send(self, sequence: Sequence, logical: int, full: Extent, swa: Extent | None, state: Extent | None) -> None:
        assert self._outbox is not None
        extents = tuple(extent for extent in (full, swa, state) if extent is not None)
        self._outbox.chunk(sequence.key, SealedChunk(logical, extents, sequence.digests[logical]))

    def sealed(self, sequence: Sequence) -> dict[str, list[int]]:
        """The folded digests of the prompt's pages in the pools of space `full`, as they were sealed."""
        folded = fold_pages(sequence.digests).to_builtins()
        return {pool: folded[pool] for pool in folded if self._pools.specs[pool].space == "full"}


def _merged(extents: list[Extent]) -> Extent:
    """One extent over all pages, in order, with the pools that all of them name; all are of one space."""
    pages = tuple(page for extent in extents for page in extent.pages)
    pools = frozenset.intersection(*(extent.pools for extent in extents))
    return Extent(extents[0].space, pages, tuple(g for e in extents for g in e.generations), pools)
