"""A rank of the plugin around SGLang's real classes, on a CPU and without a control plane. Subprocesses only."""

from __future__ import annotations

from collections import deque
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import CacheOperation, HybridCacheController
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from dsv4ctl.controlplane.link.wire import Abort, OpenRoom, Role, RoomReport
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey, RoomState
from dsv4ctl.engine_adapters.protocol import LaunchRequest
from dsv4ctl.engine_adapters.sglang import rank
from sglang_device import Device

PAGE = 256
RATIOS = [0, 4, 128, 4]
LAYERS = len(RATIOS)
HOST_PAGES = 8
PEER = "peer-1"
#: Of the components of a DeepSeek-V4 pool's state: the window and its states, a request's own.
STATE_TYPES = [StateType.SWA, getattr(StateType, "C128_STATE", None) or StateType.DSV4_REQUEST_STATE]


#: The module that newer releases' controllers copy with.
_ENGINES = [
    import_module(f"{root}.l2_transfer") for root in ("sglang.srt.mem_cache",) if find_spec(f"{root}.l2_transfer")
]


def make_pool() -> Any:
    settings = SimpleNamespace(
        enable_deepseek_v4_fp4_indexer=False, speculative_algorithm=None, speculative_num_draft_tokens=None
    )
    settings.kernel = SimpleNamespace(dsv4_attn_backend="flashmla", enable_deepseek_v4_fp4_indexer=False)
    settings.features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    settings.is_sm120 = False
    for name in ("get_server_args", "get_exec", "get_spec", "get_platform"):
        if hasattr(pools, name):
            setattr(pools, name, lambda: settings)
    pool = pools.DeepSeekV4TokenToKVPool(
        max_num_reqs=4,
        swa_size=16 * PAGE,
        c4_size=16 * PAGE // 4,
        c128_size=16 * PAGE // 128,
        c4_state_pool_size=16 * 8,
        c128_state_pool_size=1024,
        page_size=PAGE,
        swa_page_size=PAGE,
        dtype=torch.uint8,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=RATIOS,
        start_layer=0,
        end_layer=LAYERS,
    )
    pool.register_mapping(torch.arange(17 * PAGE))  # a token has the same place in both
    return pool


def tokens(*page_numbers: int) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(PAGE) + PAGE * page for page in page_numbers)])


def buffers(kvcache: Any, layer: int) -> list[tuple[str, torch.Tensor]]:
    """The buffers of a model layer that a prefix is sent by."""
    local = sum(ratio == RATIOS[layer] for ratio in RATIOS[:layer])
    if RATIOS[layer] == 4:
        index = kvcache.c4_indexer_kv_pool.index_k_with_scale_buffer[local]
        return [("c4_kv", kvcache.c4_kv_pool.kv_buffer[local]), ("index_k", index)]
    return [("c128_kv", kvcache.c128_kv_pool.kv_buffer[local])] if RATIOS[layer] == 128 else []


class HostPools:
    """Stands for the host pool group: a layer's copy is an operation of the stream it is issued on."""

    def __init__(self, device: Device) -> None:
        pool = SimpleNamespace(size=HOST_PAGES * PAGE, page_size=PAGE)
        self.entry_map = {PoolName.KV: SimpleNamespace(host_pool=pool), PoolName.SWA: self._window()}
        self.layout = "layer_first"
        self.size_per_token = 1
        # As newer releases call it: one group's anchor, whose pool is told the physical indices.
        self.anchor_entry = SimpleNamespace(name=PoolName.KV, host_pool=self, device_pool=None, layer_mapper=None)
        self.anchor_entry.packed_draft_device_pools = ()
        self.prepare_transfer_indices = lambda host, device, backend: (host, device)
        self.load_to_device_per_layer_physical = self.load_to_device_per_layer
        self.backup_from_device_all_layer_physical = self.backup_from_device_all_layer
        self.done: list[Any] = []
        self._device = device
        self._bytes: dict[tuple[str, int], torch.Tensor] = {}

    @staticmethod
    def _window() -> Any:
        """The window's entry: nothing is copied for it."""
        pool = SimpleNamespace(
            size=HOST_PAGES * PAGE,
            page_size=PAGE,
            size_per_token=1,
            prepare_transfer_indices=lambda host, device, backend: (host, device),
            backup_from_device_all_layer_physical=lambda *args: None,
        )
        return SimpleNamespace(host_pool=pool, layer_mapper=lambda layer: None, packed_draft_device_pools=())

    def load_to_device_per_layer(
        self, kvcache: Any, host: torch.Tensor, device: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> None:
        def copy() -> None:
            self.done.append(("load", layer))
            for name, buffer in buffers(kvcache, layer):
                mirror = self._bytes.get((name, layer))
                if mirror is not None:
                    buffer[device[::PAGE] // PAGE] = mirror[host[::PAGE] // PAGE]

        self._device.current.put(copy)

    def backup_from_device_all_layer(
        self, kvcache: Any, host: torch.Tensor, device: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        def copy() -> None:
            self.done.append(("backup",))
            for layer in range(LAYERS):
                for name, buffer in buffers(kvcache, layer):
                    shape = (HOST_PAGES, buffer.shape[1])
                    mirror = self._bytes.setdefault((name, layer), torch.zeros(shape, dtype=buffer.dtype))
                    mirror[host[::PAGE] // PAGE] = buffer[device[::PAGE] // PAGE]

        self._device.current.put(copy)


class World:
    """One attached rank. `frames` are what it told the control plane."""

    def __init__(self, role: Role, off: tuple[str, ...] = (), integrity: str = "off") -> None:
        self.device = Device()
        for module in (cache_controller, hybrid_cache_controller, *_ENGINES):
            module.device_module = self.device
        self.kvcache = make_pool()
        self.host = HostPools(self.device)
        self.host.anchor_entry.device_pool = self.kvcache
        self.controller = self._controller()
        self.tree = self._tree()
        engine: dict[str, object] = {"role": role.value, "name": role.value}
        rank.launched(LaunchRequest(engine, 0, "me", "group", "/nowhere", off, integrity, "tiny"))
        self.scheduler = self._scheduler()
        self.rank = rank.attach(self.scheduler, 0, 1)
        self.frames: list[Any] = []
        self.rank.agent._send = self.frames.append
        self.aborts = 0

    def _controller(self) -> Any:
        controller = object.__new__(HybridCacheController)
        controller.__dict__.update(
            mem_pool_host=self.host,
            mem_pool_device=self.kvcache,
            mem_pool_device_allocator=SimpleNamespace(alloc=self._allocate),
            page_size=PAGE,
            device="cpu",
            io_backend="direct",
            layer_num=LAYERS,
            layer_done_counter=cache_controller.LayerDoneCounter(LAYERS),
            load_stream=self.device.Stream(),
            write_stream=self.device.Stream(),
            load_queue=[],
            write_queue=[],
            ack_load_queue=[],
            ack_write_queue=[],
            has_draft=False,
            is_kv_sharded=False,
            transfer_layer_id_max=LAYERS,
            load_fence_stream=None,
            write_fence_stream=None,
        )
        for engine in _ENGINES:
            controller.l2_transfer_engine = engine.L2TransferEngine("direct")
            controller.load_stream = controller.l2_transfer_engine.host_to_device_stream
            controller.write_stream = controller.l2_transfer_engine.device_to_host_stream
            self.host.entry_map[PoolName.KV].device_pool = self.kvcache
            self.host.entry_map[PoolName.SWA].device_pool = None
        allocator = controller.mem_pool_device_allocator
        allocator.set_hicache_transfer_done_event = lambda *args: None
        self.kvcache.register_layer_transfer_counter(controller.layer_done_counter)
        self.free = list(range(14, 0, -1))
        return controller

    def _allocate(self, count: int) -> torch.Tensor:
        return tokens(*(self.free.pop() for _ in range(count // PAGE)))

    def _tree(self) -> Any:
        tree = object.__new__(UnifiedRadixCache)
        transfer = PoolTransfer(name=PoolName.KV, host_indices=tokens(0, 1), nodes_to_load=[])
        component = SimpleNamespace(
            component_type=None,
            build_hicache_transfers=lambda *args, **kwargs: [transfer],
            commit_hicache_transfer=lambda *args, **kwargs: None,
        )
        lock = SimpleNamespace(to_dec_params=lambda: None, delta=0)
        base = unified_radix_cache.BASE_COMPONENT_TYPE
        component.component_type = base
        tree.__dict__.update(
            cache_controller=self.controller,
            components={base: component},
            _components_tuple=(component,),
            sidecar_pool_specs=(),
            load_back_threshold=0,
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 1 << 20),
            ongoing_load_back={},
            inc_host_lock_ref=lambda node: lock,
            inc_lock_ref=lambda node: lock,
            dec_lock_ref=lambda *args: None,
            _update_evictable_leaf_sets=lambda node: None,
        )
        if _ENGINES:
            component.prepare_load_back = component.finalize_load_back = lambda *args, **kwargs: None
            tree._load_back_transfers = lambda **_: self.controller.load(tokens(0, 1)) is not None
        return tree

    def _scheduler(self) -> Any:
        return SimpleNamespace(
            server_args=SimpleNamespace(
                host="127.0.0.1", port=1, disaggregation_bootstrap_port=2, model_path="tiny-model"
            ),
            model_config=SimpleNamespace(context_len=4096),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE, get_kvcache=lambda: self.kvcache),
            tree_cache=self.tree,
            forward_stream=self.device.Stream(),
            enable_overlap=True,
            waiting_queue=[],
            running_batch=None,
            last_batch=None,
        )

    # ---- what happens to the rank ----------------------------------------------------------------------

    def compute(self, *page_numbers: int) -> None:
        """A forward of request slot 1 writes whole pages, and their window and states."""
        written = {"full": list(page_numbers), "swa": list(page_numbers), "state": [1]}
        for space, group in self.rank.pools.groups.items():
            for _, buffer in ((name, buffer) for name, (_, found) in group.items() for buffer in found):
                view = buffer.view(torch.uint8)
                shape = (len(written[space]), view.shape[1])
                view[written[space]] = torch.randint(0, 255, shape, dtype=torch.uint8)
        if self.rank.digests is not None:
            length = PAGE * len(page_numbers)
            self.rank.digests.seal(tokens(*page_numbers), [0], [length], torch.tensor([1]))

    def back_up(self, device_page: int, host_page: int) -> None:
        """SGLang's backup of one page, run to its end."""
        self.controller.write_queue.append(CacheOperation(tokens(host_page), tokens(device_page), 1))
        self.controller.start_writing()
        self.device.run()
        self.rank.step()

    def load_back(self) -> tuple[int, ...]:
        """SGLang's load of host pages 0 and 1; not launched yet. Returns the device pages."""
        before = len(self.controller.load_queue)
        assert self.tree.load_back(SimpleNamespace(id=len(self.tree.ongoing_load_back)))
        return tuple((self.controller.load_queue[before].device_indices[::PAGE] // PAGE).tolist())

    def open(self, room: int = 7, peers: tuple[str, ...] = (PEER,)) -> RoomKey:
        key = RoomKey(room, 1)
        self.rank.agent.handle(OpenRoom(key, "request", None, "other", peers, {"ack": 10.0}, "off"))
        return key

    def abort(self, key: RoomKey) -> None:
        self.aborts += 1
        self.rank.agent.handle(Abort(self.aborts, key, AbortSource.CLIENT, "gone"))

    def states(self, key: RoomKey) -> list[RoomState]:
        return [frame.state for frame in self.frames if isinstance(frame, RoomReport) and frame.key == key]


class Manager:
    """The parts of SGLang's NIXL manager that hooks touch."""

    def __init__(self) -> None:
        self.exceptions: dict[int, Exception] = {}
        self.failures: dict[int, str] = {}
        self.request_status: dict[int, int] = {}
        self.transfer_infos: dict[int, Any] = {}
        self.bootstrap_timeout = 300.0
        self.deferred_bootstrap = self._staging_ctx = None
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.kv_args = SimpleNamespace(state_types=STATE_TYPES)

    def record_failure(self, room: int, reason: str) -> None:
        self.failures[room] = reason

    def update_status(self, room: int, status: int) -> None:
        self.request_status[room] = status

    def _maybe_ack_drained_abort(self, room: int) -> None:
        pass

    def check_status(self, room: int) -> int:
        return self.request_status.get(room, 2)


def chunk(room: int, *page_numbers: int, last: bool = False) -> Any:
    """A chunk of the room's first generation. The last one carries the window's pages and the state of slot 1."""
    pages = np.array(page_numbers, dtype=np.int32)
    states = [pages, np.array([1], dtype=np.int32)] if last else None
    return SimpleNamespace(
        room=room, prefill_kv_indices=pages, is_last_chunk=last, state_indices=states, dsv4ctl_key=RoomKey(room, 1)
    )


class Queue:
    """SGLang's queue of chunks, without blocking: an empty one ends the worker of a test."""

    class Empty(Exception):
        pass

    def __init__(self, *chunks: Any) -> None:
        self.chunks = deque(chunks)

    def get(self) -> Any:
        if not self.chunks:
            raise Queue.Empty
        return self.chunks.popleft()

    def put(self, chunk: Any) -> None:
        self.chunks.append(chunk)
