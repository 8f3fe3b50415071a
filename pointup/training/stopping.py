"""Asked to stop: by a signal, once for a tidy end at the next step, twice for an immediate one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """Whether this process was asked to stop by SIGTERM, SIGINT or SIGUSR1.

    As a context manager it takes these signals over and gives them back at the end. The request
    is only noted: the processes agree on it in the reduction of their next step, save, and end
    together. A second SIGINT ends at once.
    """

    def __init__(self) -> None:
        self.asked_by: signal.Signals | None = None
        self.previous: dict[signal.Signals, object] = {}

    @property
    def asked(self) -> bool:
        return self.asked_by is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        again = self.asked_by == signal.SIGINT
        self.asked_by = signal.Signals(number)
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt

    def __enter__(self) -> StopRequest:
        # Python runs signal handlers in the main thread and refuses to set them elsewhere.
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
                if hasattr(signal, name):
                    number = getattr(signal, name)
                    self.previous[number] = signal.signal(number, self.note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
