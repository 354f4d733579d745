"""Runs inside a SGLang environment: the bf16 index-K hooks on the real classes, each checked with it and without it.

Prints one JSON object: check -> {"with": error or null, "without": {target: error or null}}. CPU only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

import sglang_stubs

RELEASE = sys.argv[1]
KEYS, DIM, TOPK = 64, 128, 512
POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
COMPRESSOR = "sglang.srt.layers.attention.dsv4.compressor_v2"

os.environ["PATH"] = os.environ["CUDA_HOME"] = ""  # SGLang's own kernels fail at once, compiler or not
os.environ["SGLANG_OPT_USE_TOPK_V2"] = "0"  # its plan is a CUDA kernel
os.environ["SGLANG_TOPK_TRANSFORM_512_TORCH"] = "1"

from dsv4ctl.engine_adapters.sglang import verify  # noqa: E402
from dsv4ctl.engine_adapters.sglang.index_k import geometry, hooks  # noqa: E402
from dsv4ctl.kernels import ops  # noqa: E402
from dsv4ctl.policies.sizing import ModelShape, bytes_per_full_token  # noqa: E402

os.environ.update(geometry.environment())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attribute(target: str) -> tuple[Any, str]:
    path, name = target.rsplit(".", 1)
    return pkgutil.resolve_name(path), name


@contextlib.contextmanager
def removed(target: str) -> Iterator[None]:
    """The target as SGLang ships it."""
    owner, name = attribute(target)
    hooked = owner.__dict__[name]
    setattr(owner, name, hooked.__wrapped__)
    try:
        yield
    finally:
        setattr(owner, name, hooked)


@contextlib.contextmanager
def refused(kind: type[Exception], words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        if words in str(error):
            return
        raise
    raise AssertionError(f"no {kind.__name__} about {words}")


def indexer_pool(*, fp4: bool = False) -> Any:
    module = pkgutil.resolve_name(POOL)
    module.get_server_args = lambda: SimpleNamespace(enable_deepseek_v4_fp4_indexer=fp4)
    arguments = {"size": 30 * KEYS, "page_size": KEYS, "dtype": torch.uint8, "index_head_dim": DIM, "layer_num": 2}
    if RELEASE == "0.5.23":
        arguments["use_fp4_indexer"] = fp4
    return module.DeepSeekV4IndexerPool(**arguments, device="cpu", enable_memory_saver=False)


def token_pool() -> Any:
    """A pool of which only the index keys exist: layer 0 has none, layer 1 is the first that has."""
    module = pkgutil.resolve_name(POOL)
    pool = object.__new__(module.DeepSeekV4TokenToKVPool)
    pool.c4_indexer_kv_pool = indexer_pool()
    pool.index_pools = {4: pool.c4_indexer_kv_pool}
    pool.layer_transfer_counter, pool.start_layer = None, 0
    pool.layer_mapping = [(0, 0, None), (4, 0, None), (4, 1, None)]
    return pool


def rotation(count: int = 4096) -> torch.Tensor:
    angles = torch.outer(torch.arange(count), 40000.0 ** -(torch.arange(32) / 32))
    return torch.polar(torch.ones_like(angles), angles)


def turned(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """RoPE and Hadamard in the order of fused_norm_rope_v2.cuh: complex pairs, then butterflies by lane bit."""
    pairs = torch.view_as_complex(x[:, 64:].reshape(-1, 32, 2).contiguous()) * freqs
    x = torch.cat([x[:, :64], torch.view_as_real(pairs).flatten(1)], 1)
    for bit in range(7):
        lower = (torch.arange(DIM) >> bit) & 1 == 0
        other = x[:, torch.arange(DIM) ^ (1 << bit)]
        x = torch.where(lower, x + other, other - x)
    return x * DIM**-0.5


def check_geometry() -> None:
    pool = indexer_pool()
    assert {tuple(buffer.shape[1:]) for buffer in pool.index_k_with_scale_buffer} == {(16384,)}
    host = pkgutil.resolve_name("sglang.srt.mem_cache.memory_pool_host")
    buffers = pool.index_k_with_scale_buffer
    mirror = host.DeepSeekV4PagedHostPool("index_k", buffers, buffers[0].shape[1], 4, 256, pin_memory=False)
    assert mirror.get_contiguous_buf_infos()[2] == [16384, 16384]
    owner = object.__new__(pkgutil.resolve_name(POOL).DeepSeekV4TokenToKVPool)
    none = SimpleNamespace(kv_buffer=[])
    vars(owner).update(
        _unified_kv=False, _unified_kv_fp8=False, page_size=256, compression_ratios=[4, 4], _stage_start=0,
        _stage_end=2, c4_indexer_kv_pool=pool, c4_kv_pool=none, c128_kv_pool=none, index_pools={4: pool},
        kv_pools={4: none},
    )  # fmt: skip
    assert owner.get_contiguous_buf_infos()[2] == [16384, 16384]


def check_creation() -> None:
    os.environ["SGLANG_OPT_USE_TILELANG_INDEXER"] = "1"
    indexer_pool()
    assert os.environ["SGLANG_OPT_USE_TILELANG_INDEXER"] == "0"
    with refused(ValueError, "fp4 indexer"):
        indexer_pool(fp4=True)


def check_sizing() -> None:
    layers = {0: 2, 4: 21, 128: 20}
    expected = [bytes_per_full_token(ModelShape(layers=layers, index_k_dtype=dtype)).total for dtype in ("bf16", "fp8")]
    module = pkgutil.resolve_name("sglang.srt.model_executor.pool_configurator")
    if RELEASE == "0.5.23":
        grown = module.get_dsv4_indexer_bytes_per_token(DIM, False) - 132
        assert module.get_dsv4_indexer_bytes_per_token(DIM, use_fp4_indexer=True) == 68
        assert grown * 21 / 4 == expected[0] - expected[1] == 651
        return
    sizes = object.__new__(module.DSV4PoolConfigurator)
    vars(sizes).update(
        qk_nope_head_dim=448, qk_rope_head_dim=64, indexer_head_dim=DIM, swa_ratio=0.1, swa_page_size=256,
        c4_ring_size=8, c128_ring_size=128, c4_shrink_factor=1, num_layers_total=43, num_layers_ca4=21,
        num_layers_ca128=20,
    )  # fmt: skip
    plain = module.DSV4PoolConfigurator._get_bytes_per_full_token
    plain = getattr(plain, "__wrapped__", plain)
    assert sizes._get_bytes_per_full_token() - plain(sizes) == expected[0] - expected[1] == 651


def plan_of(lengths: list[int], tokens: list[int] | None) -> Any:
    """A real plan: decode, or prefill with the batch's token of each row."""
    module = pkgutil.resolve_name(COMPRESSOR)
    words = torch.full((len(lengths), 4), -1, dtype=torch.int32)
    words[:, 0] = torch.tensor(lengths)
    if tokens is None:
        return module.CompressorDecodePlan(4, words.view(torch.uint8))
    words[:, 1] = torch.tensor(tokens) | 3 << 16
    return module.CompressorPrefillPlan(4, words.view(torch.uint8), torch.empty(0, 8, dtype=torch.uint8))


def store(pool: Any, plan: Any, rows: torch.Tensor, out_loc: torch.Tensor) -> None:
    """As `CompressorBackendMixin._forward_compress_all_in_one` stores what it has compressed."""
    pkgutil.resolve_name(COMPRESSOR).compress_norm_rope_store(
        rows, plan, norm_weight=normal(DIM, seed=1), norm_eps=1e-6, freq_cis=rotation(), out_loc=out_loc,
        kvcache=pool.get_index_k_with_scale_buffer(1).view(dtype=torch.uint8), page_size=KEYS, use_fp4=False,
        bf16_store=False,
    )  # fmt: skip


def check_store() -> None:
    for lengths, tokens in (([8, 9, 4, 4000], None), ([8, -1, 4, 4000], [0, 0, 3, 1])):
        pool = token_pool()
        rows, out_loc = normal(4, DIM, seed=2).to(torch.bfloat16), torch.tensor([70, 5, 640, 1900])
        store(pool, plan_of(lengths, tokens), rows, out_loc)
        x = rows.float() * torch.rsqrt(rows.float().square().mean(1, keepdim=True) + 1e-6) * normal(DIM, seed=1)
        written = [0, 2, 3]
        positions = torch.tensor(lengths)[written] - 4
        expected = turned(x[written], rotation()[positions]).to(torch.bfloat16).float()
        keys = pool.c4_indexer_kv_pool.index_k_with_scale_buffer[0].view(torch.bfloat16).view(-1, DIM)
        slots = out_loc[torch.tensor(written if tokens is None else tokens)[[0, 1, 2] if tokens is None else written]]
        assert torch.allclose(keys[slots].float(), expected, rtol=2**-7, atol=2e-5)
        keys[slots] = 0
        assert not keys.any(), "wrote elsewhere"


def c4_indexer(module: Any) -> Any:
    """The two projections of a C4Indexer as fixed matrices, everything after them its own code."""
    indexer = SimpleNamespace(
        layer_id=1, use_fp4_indexer=False, n_local_heads=64, head_dim=DIM, weight_scale=DIM**-0.5 / 8, index_topk=TOPK,
        freqs_cis=rotation(), compressor=None, wq_b=lambda x: (x, None),
        compute_weights=lambda x, skip_scale=False: x,
    )  # fmt: skip
    indexer.compute_q = lambda *arguments: module.C4Indexer.compute_q(indexer, *arguments)
    return indexer


def run_indexer(mode: str, counts: list[int] | None) -> None:
    """The real `forward_c4_indexer` over 11 pages of random keys chooses what exact arithmetic chooses."""
    module = pkgutil.resolve_name(INDEXER)
    metadata = pkgutil.resolve_name("sglang.srt.layers.attention.dsv4.metadata")
    modes = pkgutil.resolve_name("sglang.srt.model_executor.forward_batch_info").ForwardMode
    pool = token_pool()
    keys = normal(31 * KEYS, DIM, seed=3).to(torch.bfloat16)
    pool.c4_indexer_kv_pool.index_k_with_scale_buffer[0].copy_(keys.view(torch.uint8).view(31, -1))
    lengths = torch.tensor([513, 700, 704, 40], dtype=torch.int32)
    pages = torch.randperm(30, generator=torch.Generator().manual_seed(6)).to(torch.int32) + 1
    table = torch.stack([pages[:11], pages[:11], pages[:11], pages[11:22]])
    fields: dict[str, Any] = {"page_size": 256, "page_table": table}
    if RELEASE == "0.5.16":
        fields["c4_seq_lens"] = lengths
    else:
        fields.update(compressed_seq_lens=lengths, compressed_page_size=KEYS, use_topk_v2=False)
    indexer_metadata = metadata.PagedIndexerMetadata(**fields)
    assert indexer_metadata.deep_gemm_metadata is None
    core = SimpleNamespace(
        positions=lengths.long() * 4 - 1, page_table=table, c4_sparse_raw_indices=None,
        c4_sparse_page_indices=torch.full((4, TOPK), -2, dtype=torch.int32),
    )  # fmt: skip
    backend = object.__new__(module.C4IndexerBackendMixin)
    torch_topk = SimpleNamespace(is_torch=lambda: True, is_sgl_kernel=lambda: False)
    vars(backend).update(
        token_to_kv_pool=pool, forward_metadata=SimpleNamespace(indexer_metadata=indexer_metadata, core_metadata=core),
        hisparse_coordinator=None, debug_use_external_c4_sparse_indices=False, dsa_topk_backend=torch_topk,
        forward_indexer_compressor=lambda **_: None,
    )  # fmt: skip
    batch = SimpleNamespace(
        forward_mode=modes[mode], _original_forward_mode=None, tbo_parent_token_range=None, extend_seq_lens_cpu=counts
    )
    q, weights = normal(4, 64 * DIM, seed=4).to(torch.bfloat16), normal(4, 64, seed=5).to(torch.bfloat16)
    backend.forward_c4_indexer(x=weights, q_lora=q, c4_indexer=c4_indexer(module), forward_batch=batch)
    for row, length in enumerate(lengths.tolist()):
        turned_q = turned(q[row].view(64, DIM).float(), rotation()[core.positions[row]]).to(torch.bfloat16).float()
        slots = (table[row, :, None] * KEYS + torch.arange(KEYS)).flatten()[:length]
        logits = weights[row].float() @ (turned_q @ keys[slots].float().T).relu()
        expected = slots[logits.topk(min(TOPK, length)).indices]
        chosen = core.c4_sparse_page_indices[row]
        chosen = chosen[chosen >= 0]
        assert len(set(chosen.tolist()) & set(expected.tolist())) >= len(expected) - 1, "another choice"
        assert len(chosen) == len(expected)


def check_read() -> None:
    run_indexer("DECODE", None)


def check_sharing() -> None:
    rows: list[int] = []
    plain = ops.paged_logits

    def seen(*arguments: Any, **options: Any) -> None:
        rows.append(arguments[5].rows)
        plain(*arguments, **options)

    ops.paged_logits = seen
    try:
        run_indexer("EXTEND", [3, 1])
    finally:
        ops.paged_logits = plain
    assert rows == [4], "queries of one sequence did not share its keys"


def check_refusals() -> None:
    pool = indexer_pool()
    for name in ("get_index_k_scale_buffer", "set_index_k_scale_buffer", "set_index_fused", "set_index_fp4"):
        with refused(NotImplementedError, "index_k_dtype bf16"):
            getattr(pool, name)(0, torch.tensor([1]), normal(1, DIM))


def chained(tokens: list[int], prior: bytes | None, page_size: int) -> list[str]:
    """The contract of SGLang's `get_native_hash`, which is built by a C++ compiler."""
    hashes = []
    for at in range(0, len(tokens), page_size):
        prior = hashlib.sha256((prior or b"") + repr(tokens[at : at + page_size]).encode()).digest()
        hashes.append(prior.hex())
    return hashes


def check_storage() -> None:
    utils = pkgutil.resolve_name("sglang.srt.mem_cache.utils")
    utils.get_native_hash = chained
    tokens = list(range(512))
    pages = utils.get_hash_str(tokens, None, 256)
    plain = utils.get_hash_str.__wrapped__ if hasattr(utils.get_hash_str, "__wrapped__") else utils.get_hash_str
    assert set(pages).isdisjoint(plain(tokens, None, 256))
    assert utils.get_hash_str(tokens[256:], pages[0], 256) == pages[1:]
    if RELEASE == "0.5.23":
        seeds = [utils.storage_namespace_seed(None, None), utils.storage_namespace_seed("a", None)]
        plain_seed = getattr(utils.storage_namespace_seed, "__wrapped__", utils.storage_namespace_seed)
        assert len({*seeds, plain_seed(None, None), plain_seed("a", None)}) == 4


def failure(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception as error:  # noqa: BLE001 - whatever a missing hook leads to, it is reported
        return f"{type(error).__name__}: {error}"[:300]
    return None


def guards(target: str) -> Callable[[], None] | None:
    """The check that fails without the hook on `target`; None: no code of SGLang reaches it on a CPU."""
    name = target.rsplit(".", 1)[1]
    if name in ("get_bytes_per_token", "get_dsv4_indexer_bytes_per_token"):
        return check_geometry
    if name == "_create_buffer":
        return check_creation
    if name == "_get_bytes_per_full_token":
        return check_sizing
    if name == "compress_norm_rope_store":
        return check_store
    if name in ("get_hash_str", "storage_namespace_seed"):
        return check_storage
    if name == "forward_c4_indexer":
        return check_sharing
    if name.endswith("_sm120"):
        return None
    return check_refusals if ".DeepSeekV4IndexerPool." in target else check_read


def main() -> None:
    sglang_stubs.install()
    torch.compile = lambda function=None, **_: function or (lambda inner: inner)  # its compiler takes seconds to import
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    functions = {}
    for target, kind, function in hooks.HOOKS[RELEASE]:
        functions[target] = function
        HookRegistry.register(target, function, HookType(kind))
    HookRegistry.apply_hooks()
    report: dict[str, Any] = {"problems": verify.problems(functions, sys.modules), "checks": {}}
    checks = (
        check_geometry, check_creation, check_sizing, check_store, check_read, check_sharing,
        check_refusals, check_storage,
    )  # fmt: skip
    for check in checks:
        report["checks"][check.__name__] = failure(check)
    report["without"] = {}
    for target in functions:
        check = guards(target)
        if check is not None:
            with removed(target):
                report["without"][target] = failure(check)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
