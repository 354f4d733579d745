"""Arguments as a release of SGLang declares them: read as text, never imported."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Annotated as A  # noqa: N817 - as SGLang calls it

if TYPE_CHECKING:
    import argparse


def Arg(**_: object) -> None:  # noqa: N802 - as SGLang calls it
    return


class ServerArgs:
    model_path: A[str, Arg(help="The model.", aliases=["--model"])]
    port: A[int, "The port."] = 30000
    tp_size: A[int, Arg(help="Ranks.", aliases=["--tensor-parallel-size"])] = 1
    device: A[str, "The device."] = "cuda"
    page_size: A[int, "Tokens of a page."] = 1
    hicache_size: A[int, "Gigabytes."] = 0
    max_running_requests: A[int, "Requests."] = 48
    hidden: A[bool, Arg(no_cli=True)] = False
    renamed: A[bool, Arg(help="Another name.", cli_name="--other-name")] = False
    plain: int = 3

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--skip-server-warmup", action="store_true")
