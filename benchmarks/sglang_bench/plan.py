"""Which servers run where, and with what."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from sglang_bench.machine import Machine, Shape

#: Tiny random weights in bf16, deterministic top-k, compiled kernels kept where a run before left them.
ENV: Mapping[str, str] = {
    "SGLANG_DSV4_FP4_EXPERTS": "0",
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    "SGLANG_OPT_DSV4_NONPAGED_INDEXER": "0",
    "SGLANG_TOPK_TRANSFORM_512_TORCH": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
#: Below $JIT_CACHE.
CACHES: Mapping[str, str] = {
    "TVM_FFI_CACHE_DIR": "tvm",
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "SGLANG_DG_CACHE_DIR": "dg",
    "DG_JIT_CACHE_DIR": "dg",
    "FLASHINFER_WORKSPACE_BASE": "fi",
    "XDG_CACHE_HOME": "xdg",
}
EXTRA = [
    "--load-format",
    "dummy",
    "--skip-tokenizer-init",
    "--skip-server-warmup",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--cuda-graph-backend-decode",
    "disabled",
    "--cuda-graph-backend-prefill",
    "disabled",
    "--watchdog-timeout",
    "1200",
    "--random-seed",
    "1",
    "--enable-cache-report",
    "--swa-full-tokens-ratio",
    "1.0",
]
_SMALL = ("--max-running-requests", "96", "--chunked-prefill-size", "4096")
_LARGE = ("--max-running-requests", "64", "--chunked-prefill-size", "8192")
#: Communication of several ranks without NVLink multicast and without kernels that would be compiled first.
_PLAIN_TP = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
#: Device pages of a prefill engine that is to load from the host, and host pages for each.
_PRESSED, _HOST = 32_768, 8.0
_EARLY_PREFILL, _EARLY_DECODE, _EARLY_HOST = 256 * 2560, 256 * 5400, 2.2


def machine(out: Path, *, fake: bool) -> Machine:
    """The one that this runs on; `fake`: servers that compute nothing, for a dry run."""
    models = Path(os.environ.get("BENCH_MODELS", "models"))
    env = dict(ENV)
    if "NIXL_PLUGIN_DIR" in os.environ:
        env["NIXL_PLUGIN_DIR"] = os.environ["NIXL_PLUGIN_DIR"]
    if "JIT_CACHE" in os.environ:
        env |= {name: f"{os.environ['JIT_CACHE']}/{folder}" for name, folder in CACHES.items()}
    return Machine(out, models, env, ("--device", "cpu") if fake else tuple(EXTRA))


def single(
    name: str, port: int, gpus: str = "0", *, fake: bool, ranks: int = 1, model: str = "model", index_k: str = "fp8"
) -> Shape:
    """An oracle: no cache."""
    extra = () if fake else (*_SMALL, "--disable-radix-cache", *(_PLAIN_TP if ranks > 1 else ()))
    return Shape(name, "single", port, gpus, ranks, model, index_k=index_k, extra=extra)


def pair(
    name: str, port: int, gpus: str = "0", *, fake: bool, ranks: int = 1, index_k: str = "fp8", overlap: bool = True,
    hicache: bool = True, env: Mapping[str, str] | None = None,
) -> tuple[Shape, Shape]:  # fmt: skip
    """Prefill whose device pool is under pressure, with HiCache or without, and decode.

    Engines of one rank given two cards have one each.
    """
    apart = gpus.split(",") if ranks == 1 else [gpus]
    extra: tuple[str, ...] = () if fake else (*_SMALL, *(_PLAIN_TP if ranks > 1 else ()))
    extra = extra if overlap or fake else (*extra, "--disable-overlap-schedule")
    host, more = _HOST if hicache else None, dict(env or {})
    return (
        Shape(
            f"{name}-prefill", "prefill", port, apart[0], ranks, "model", _PRESSED, host, port + 1, index_k, extra, more
        ),
        Shape(f"{name}-decode", "decode", port + 2, apart[-1], ranks, "model", 131_072, None, 0, index_k, extra, more),
    )


def ports(pair: Iterable[Shape]) -> tuple[int, ...]:
    return tuple(shape.port for shape in pair)


def early_pair(
    name: str, port: int, folder: Path, gpus: str, *, fake: bool, index_k: str = "fp8"
) -> tuple[Shape, Shape]:
    """Large pools, a model whose pages are heavy, the probe on: see `early_send`."""
    folder.mkdir(parents=True, exist_ok=True)
    extra: tuple[str, ...] = () if fake else _LARGE

    def shape(role: str, side: str, port: int, tokens: int, hicache: float | None, bootstrap_port: int) -> Shape:
        env = {"ES_LOG": str(folder), "ES_ROLE": side}
        model = "model_early"
        return Shape(f"{name}-{role}", role, port, gpus, 1, model, tokens, hicache, bootstrap_port, index_k, extra, env)

    return (
        shape("prefill", "P1", port, _EARLY_PREFILL, _EARLY_HOST, port + 1),
        shape("decode", "D", port + 2, _EARLY_DECODE, None, 0),
    )
