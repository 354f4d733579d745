"""bf16 index keys without SGLang: what its indexer and compressor call in our place."""

import os
from types import SimpleNamespace

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from dsv4ctl.engine_adapters.sglang.index_k import geometry, hooks, read, store, warm
from dsv4ctl.engine_adapters.sglang.index_k.pages import IndexKeys, pages_of
from dsv4ctl.engine_adapters.sglang.index_k.targets import store_targets_reference
from dsv4ctl.engine_adapters.sglang.index_k.targets_triton import store_targets_triton
from dsv4ctl.kernels import index_k, ops
from dsv4ctl.kernels.logits import QueryBlocks


def plan_of(*rows: tuple[int, int]) -> torch.Tensor:
    """A plan of (sequence length, second word) rows."""
    words = torch.full((len(rows), 4), 77, dtype=torch.int32)
    if rows:
        words[:, :2] = torch.tensor(rows)
    return words.view(torch.uint8)


@pytest.mark.parametrize("targets", [store_targets_reference, store_targets_triton])
def test_a_decode_row_is_stored_when_it_fills_its_group(targets) -> None:  # type: ignore[no-untyped-def]
    out_loc = torch.tensor([70, 71, 72, 73, 74])
    slots, positions = targets(plan_of((8, 9), (9, 9), (4, 9), (0, 9), (4096, 9)), out_loc, 4, decode=True)
    assert slots.tolist() == [70, -1, 72, -1, 74]
    assert positions.tolist() == [4, 0, 0, 0, 4092]


@pytest.mark.parametrize("targets", [store_targets_reference, store_targets_triton])
def test_a_prefill_row_is_stored_at_its_token_of_the_batch(targets) -> None:  # type: ignore[no-untyped-def]
    out_loc = torch.arange(100, 170)
    plan = plan_of((8, 7 << 16 | 3), (-1, 0), (400, 69))
    slots, positions = targets(plan, out_loc, 4, decode=False)
    assert slots.tolist() == [103, -1, 169]
    assert positions.tolist() == [4, 0, 396]
    assert targets(plan_of(), out_loc, 4, decode=False)[0].tolist() == []


def stored(kv: torch.Tensor, pages: torch.Tensor, **changes: object) -> list[object]:
    """Call the hooked store; returns what reached SGLang's own."""
    reached: list[object] = []
    arguments = {
        "norm_weight": torch.ones(128), "norm_eps": 1e-6, "freq_cis": torch.ones(9, 32, dtype=torch.complex64),
        "out_loc": torch.tensor([65]), "kvcache": pages, "page_size": 64, "use_fp4": False, "bf16_store": False,
        **changes,
    }  # fmt: skip
    plan = SimpleNamespace(compress_ratio=4, is_decode=True, plan_d=plan_of((8, 0)))
    plan = type("Plan", (tuple,), vars(plan))((4, plan.plan_d))
    store.compress_norm_rope_store(lambda *_, **options: reached.append(options), kv, plan, **arguments)
    return reached


def test_index_keys_are_stored_in_bf16_and_attention_keys_by_sglang() -> None:
    pages = torch.zeros(2, index_k.PAGE_BYTES["bf16"], dtype=torch.uint8)
    row = torch.randn(1, 128)
    assert stored(row, pages) == []
    expected = (row * torch.rsqrt(row.square().mean() + 1e-6)) @ index_k.hadamard(row.device)
    assert torch.allclose(pages.view(torch.bfloat16).view(128, 128)[65].float(), expected[0], rtol=2**-7, atol=1e-3)
    assert stored(torch.zeros(1, 512), pages)[0]["bf16_store"] is False  # type: ignore[index]


@pytest.mark.parametrize("changes", [{"use_fp4": True}, {"page_size": 32}, {"kvcache": torch.zeros(2, 8448)}])
def test_a_store_of_another_geometry_is_an_error(changes: dict[str, object]) -> None:
    pages = torch.zeros(2, index_k.PAGE_BYTES["bf16"], dtype=torch.uint8)
    with pytest.raises(ValueError, match="16384 B and no fp4 indexer expected"):
        stored(torch.zeros(1, 128), pages, **changes)


def test_the_accessor_gives_the_views_of_its_two_readers_and_no_other() -> None:
    pages = torch.zeros(3, index_k.PAGE_BYTES["bf16"], dtype=torch.uint8)
    keys = read.index_keys(pages, object(), layer_id=1)
    assert keys.dim() == 2
    assert keys.view(dtype=torch.uint8) is pages
    assert keys.view(keys.shape[0], 64, 1, 132) is keys
    assert pages_of(keys) is pages
    with pytest.raises(TypeError, match="no code of SGLang reads them as keys"):
        keys.view(3, 64, 1, 68)
    with pytest.raises(AttributeError, match="reads fp8 keys"):
        keys.data_ptr()
    with pytest.raises(TypeError, match="accessor is not hooked"):
        pages_of(pages)
    with pytest.raises(ValueError, match="8448 B where index_k_dtype is bf16"):
        IndexKeys(torch.zeros(3, 8448, dtype=torch.uint8))


def test_logits_take_the_shapes_of_sglangs_indexer() -> None:
    pages = torch.randn(4, 64, 128).to(torch.bfloat16)
    cache = IndexKeys(pages.view(torch.uint8).view(4, -1))
    q, weights = torch.randn(2, 1, 64, 128).to(torch.bfloat16), torch.randn(2, 64)
    table, lengths = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([[70], [5]])
    out = read.paged_logits(q, cache, weights, lengths, table, None, 128, False)
    keys = torch.cat([pages[3], pages[1]])[:70].float()
    assert torch.allclose(out[0, :70], index_k.index_logits(q[0].float(), weights[:1], keys)[0], atol=1e-3)
    assert torch.allclose(
        out[1, :5], index_k.index_logits(q[1].float(), weights[1:], pages[2, :5].float())[0], atol=1e-3
    )
    assert read.paged_logits(q[:0], cache, weights[:0], lengths[:0], table[:0], None, 128).shape == (0, 128)
    with pytest.raises(ValueError, match="32 heads"):
        read.paged_logits(q[:, :, :32], cache, weights, lengths, table, None, 128)


def test_queries_of_one_sequence_share_its_keys_in_an_eager_prefill_and_the_logits_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = torch.randn(6, 64, 128).to(torch.bfloat16)
    cache = IndexKeys(pages.view(torch.uint8).view(6, -1))
    q, weights = torch.randn(7, 1, 64, 128).to(torch.bfloat16), torch.randn(7, 64)
    table = torch.tensor([[3, 1]] * 5 + [[2, 0]] * 2, dtype=torch.int32)
    lengths = torch.tensor([65, 66, 66, 67, 67, 3, 4])
    seen: list[QueryBlocks] = []
    plain = ops.paged_logits
    monkeypatch.setattr(ops, "paged_logits", lambda *a, **k: (seen.append(a[5]), plain(*a, **k)))

    def run(**changes: object) -> torch.Tensor:
        out: list[torch.Tensor] = []
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name="EXTEND"), _original_forward_mode=None, tbo_parent_token_range=None,
            extend_seq_lens_cpu=[5, 2],
        )  # fmt: skip
        vars(batch).update(changes)
        body = lambda backend, forward_batch: out.append(  # noqa: E731
            read.paged_logits(q, cache, weights, lengths, table, None, 128).nan_to_num()
        )
        read.forward_c4_indexer(body, object(), forward_batch=batch)
        return torch.where(torch.arange(128) < lengths[:, None], out[0], 0.0)

    shared = run()
    assert seen[-1].rows == 4
    assert seen[-1].first.tolist() == seen[-1].sequence.tolist() == [0, 4, 5]
    others: list[dict[str, object]] = [
        {"extend_seq_lens_cpu": [5, 1]},
        {"extend_seq_lens_cpu": None},
        {"forward_mode": SimpleNamespace(name="DECODE")},
        {"tbo_parent_token_range": (0, 7)},
        {"_original_forward_mode": "EXTEND"},
    ]
    for changes in others:
        assert torch.allclose(run(**changes), shared, atol=1e-4)
        assert seen[-1].rows == 1
    read.paged_logits(q, cache, weights, lengths, table, None, 128)
    assert seen[-1].rows == 1


def test_the_kernels_are_compiled_by_launches_on_pages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for name in ("norm_rope_hadamard_store", "index_queries", "paged_logits"):
        plain = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, n=name, f=plain, **k: (launched.append(n), f(*a, **k))[1])
    warm.compile_kernels(torch.device("cpu"))
    assert launched == ["norm_rope_hadamard_store", "index_queries", *["paged_logits"] * 3]


def test_a_pool_with_the_fp4_indexer_or_another_head_dim_is_refused() -> None:
    pool = SimpleNamespace(use_fp4_indexer=False, index_head_dim=128)
    assert geometry.pool_bytes_per_token(pool) == 256
    with pytest.raises(ValueError, match="exclude each other"):
        geometry.pool_bytes_per_token(SimpleNamespace(use_fp4_indexer=True, index_head_dim=128))
    with pytest.raises(ValueError, match="head dim of 64"):
        geometry.pool_bytes_per_token(SimpleNamespace(use_fp4_indexer=False, index_head_dim=64))


def test_a_pool_of_other_pages_is_refused_and_one_without_layers_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in geometry.environment():
        monkeypatch.setenv(name, "unset")
    bf16, fp4 = (torch.zeros(2, size, dtype=torch.uint8) for size in (index_k.PAGE_BYTES["bf16"], 4352))
    for buffers in ([bf16, fp4], None):
        with pytest.raises(ValueError, match="16384 B in every index-K pool"):
            geometry.created(None, SimpleNamespace(index_k_with_scale_buffer=buffers, device="cpu"))
    assert os.environ["SGLANG_OPT_USE_TILELANG_INDEXER"] == "unset"
    for buffers in ([bf16], []):
        geometry.created(None, SimpleNamespace(index_k_with_scale_buffer=buffers, device="cpu"))
    assert geometry.environment().items() <= os.environ.items()


def test_every_release_hooks_each_target_once() -> None:
    for table in hooks.HOOKS.values():
        targets = [target for target, _, _ in table]
        assert len(targets) == len(set(targets))
