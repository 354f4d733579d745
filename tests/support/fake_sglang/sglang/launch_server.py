"""A server that starts as SGLang does: HTTP in this process, one scheduler process a rank below it.

Environment: FAKE_GATE names a file without which /health says 503. A request's `hang` never ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def _options(argv: list[str]) -> dict[str, str]:
    """`--name value` and `--name` of the command line."""
    found: dict[str, str] = {}
    for at, word in enumerate(argv):
        if word.startswith("--"):
            following = argv[at + 1 : at + 2]
            found[word[2:]] = following[0] if following and not following[0].startswith("--") else ""
    return found


class Schedulers:
    """The scheduler processes; what is said to one is said to all."""

    def __init__(self, options: dict[str, str]) -> None:
        self._processes = [
            subprocess.Popen([sys.executable, "-m", "sglang.scheduler", str(rank)], stdin=subprocess.PIPE, text=True)
            for rank in range(int(options["tp-size"]))
        ]
        self._lock = threading.Lock()

    def done(self, room: int) -> None:
        with self._lock:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(f"{room}\n")
                process.stdin.flush()

    def watch(self) -> None:
        """SGLang ends as a whole when one of its schedulers does."""
        for process in self._processes:
            threading.Thread(target=lambda one=process: (one.wait(), os.kill(os.getpid(), signal.SIGQUIT))).start()


def _handler(schedulers: Schedulers, role: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def _say(self, status: int, body: Any) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            gate = os.environ.get("FAKE_GATE")
            self._say(200 if gate is None or Path(gate).exists() else 503, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body.get("hang"):
                threading.Event().wait()
            schedulers.done(body["bootstrap_room"])
            ids = body["input_ids"]
            info = {"output_token_logprobs": [[-0.0625, token, None] for token in ids], "cached_tokens": 7}
            self._say(200, {"output_ids": ids[::-1], "meta_info": info, "role": role, "seen": body})

    return Handler


def main() -> None:
    options = _options(sys.argv[1:])
    schedulers = Schedulers(options)
    schedulers.watch()
    print("[2026-11-29 16:00:00] server_args=ServerArgs(...)", flush=True)
    address = (options["host"], int(options["port"]))
    handler = _handler(schedulers, options.get("disaggregation-mode", "single"))
    ThreadingHTTPServer(address, handler).serve_forever()


if __name__ == "__main__":
    main()
