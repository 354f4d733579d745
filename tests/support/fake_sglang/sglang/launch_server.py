"""A server that starts as SGLang does: HTTP in this process, one scheduler process a rank below it.

Environment: FAKE_GATE names a file without which /health says 503; ES_LOG a folder for what a probe would note.
A request's `hang` never ends. Without the control plane's variable it has no schedulers: a stock server.
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
            for rank in range(int(options["tp-size"]) if "DSV4CTL_ENGINE" in os.environ else 0)
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
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            if self.path != "/generate":
                self._say(200, {})
                return
            if body.get("hang"):
                threading.Event().wait()
            _note_pages(role, body)
            schedulers.done(body.get("bootstrap_room", 0))
            whole = answer(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            if not body.get("stream"):
                self._say(200, {**whole, "role": role, "seen": body})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"data: " + json.dumps(whole).encode() + b"\n\ndata: [DONE]\n\n")
            self.close_connection = True

    return Handler


def answer(ids: list[int], new: int) -> dict[str, Any]:
    """What depends on the prompt alone."""
    out = [(sum(ids) + at) % 997 for at in range(new)]
    info = {"output_token_logprobs": [[-0.0625 * at, token, None] for at, token in enumerate(out)], "cached_tokens": 7}
    return {"output_ids": out, "meta_info": {**info, "cached_tokens_details": {"device": 0, "host": 7}}}


def _note_pages(role: str, body: dict[str, Any]) -> None:
    """One send of all pages, early if the prompt is long; every fifth room's second page arrives wrong."""
    folder, room, pages = os.environ.get("ES_LOG"), body.get("bootstrap_room", 0), len(body["input_ids"]) // 256
    if folder is None:
        return
    sums = [[at, room % 1000] for at in range(pages)]
    early, common = pages > 100, {"room": room, "t": 1}
    if role == "prefill":
        send = {
            "k": "send",
            "c": 0,
            "last": not early,
            "early": early,
            "pos": 0,
            "pages": list(range(pages)),
            "load": 1,
        }
        records = [{"k": "load", "t0": 1, "gpu_ms": 12.0, "pages": [0]}, {**send, **common, "ck": sums}]
    else:
        if room % 5 == 0 and pages > 1:
            sums[1] = [-1, -1]
        records = [{"k": "dck", "n": pages, "ck": sums, **common}]
    with (Path(folder) / f"{os.environ['ES_ROLE']}.{os.getpid()}.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True


def main() -> None:
    options = _options(sys.argv[1:])
    schedulers = Schedulers(options)
    schedulers.watch()
    print("[2026-11-29 16:00:00] server_args=ServerArgs(...)", flush=True)
    address = (options["host"], int(options["port"]))
    handler = _handler(schedulers, options.get("disaggregation-mode", "single"))
    _Server(address, handler).serve_forever()


if __name__ == "__main__":
    main()
