"""A rank's end of the link that outlives its control plane, and finds the next one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from dsv4ctl.controlplane.link.client import LinkClient, LinkRefusedError
from dsv4ctl.controlplane.link.codec import FrameError
from dsv4ctl.controlplane.link.wire import Hello, ToControlPlane, ToRank, Welcome

#: Seconds between two looks for another control plane.
_PAUSE = 0.2


class LastingLink:
    """A `LinkClient` after the other, each with the Hello of the first. Between two, what is sent goes nowhere.

    `orphaned` is told why a control plane is gone, once no frame of it is handled any more; `adopted` is called
    before any frame of the next one is. `lost`: no control plane will take this rank in any more.
    """

    def __init__(
        self,
        path: str,
        on_frame: Callable[[ToRank], None],
        on_bad_frame: Callable[[FrameError], None],
        lost: Callable[[str], None],
        orphaned: Callable[[str], None],
        adopted: Callable[[], None],
    ) -> None:
        self._make: Callable[[], LinkClient] = partial(LinkClient, path, on_frame, on_bad_frame, self._gone)
        self._lost, self._orphaned, self._adopted = lost, orphaned, adopted
        self._link = self._make()

    def connect(self, hello: Hello, timeout: float) -> Welcome:
        """Raises LinkRefusedError, OSError."""
        self._hello, self._timeout = hello, timeout
        return self._link.connect(hello, timeout)

    def start(self) -> None:
        self._link.start()

    def send(self, frame: ToControlPlane) -> None:
        """Never blocks. Raises FrameError for a frame that is too long."""
        self._link.send(frame)

    def finish(self, timeout: float) -> None:
        self._link.finish(timeout)

    def _gone(self, why: str) -> None:
        """On whichever thread met the end, which may hold locks: the search has one of its own."""
        threading.Thread(target=self._outlive, args=(why,), name="link-seek", daemon=True).start()

    def _outlive(self, why: str) -> None:
        try:
            self._link.join()
            self._orphaned(why)
            self._link = self._seek()
            self._adopted()
            self._link.start()
        except LinkRefusedError as refused:
            self._lost(f"refused: {refused}")
        except Exception as error:
            self._lost(f"no other control plane can be looked for: {error!r}")
            raise

    def _seek(self) -> LinkClient:
        """A link to the next control plane. No deadline: to wait for it is what surviving means.

        Raises LinkRefusedError.
        """
        while True:
            link = self._make()
            try:
                link.connect(self._hello, self._timeout)
            except OSError:
                time.sleep(_PAUSE)
            else:
                return link
