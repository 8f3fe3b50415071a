"""Progress bar of a run on a terminal, or log lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections import deque

from tqdm import tqdm

logger = logging.getLogger("pointup")


class ProgressBar:
    """Shows step, loss, speed and time left: a bar on a terminal, elsewhere a line every
    `seconds_between_lines`.

    Speed is that of the last 64 steps, without evaluations. The time left follows from the progress
    since the start of this process, evaluations included.
    """

    def __init__(self, seconds_between_lines: float = 30.0) -> None:
        self.seconds_between_lines = seconds_between_lines
        self.bar: tqdm | None = None
        if sys.stderr.isatty():
            bar_format = "{percentage:3.0f}% |{bar:24}| {desc}"
            self.bar = tqdm(total=1.0, bar_format=bar_format, dynamic_ncols=True)
        self.recent: deque[tuple[float, int]] = deque(maxlen=64)
        self.began: tuple[float, float] | None = None
        self.line, self.share_done = "", 0.0
        self.is_logged = True
        self.drawn_at = self.logged_at = -math.inf

    def move(
        self,
        step: int,
        total_steps: int | None,
        share_done: float,
        loss: float,
        learning_rate: float,
        num_tokens: int,
    ) -> None:
        now = time.monotonic()
        if total_steps and step > total_steps and share_done > 0:
            # A number of epochs was given, and their past part had more steps, of a smaller budget.
            total_steps = round(step / share_done)
        where = f"step {step:,}" + (f"/{total_steps:,}" if total_steps else "")
        state = [where, f"loss {loss:.4g}"]
        if math.isfinite(learning_rate):
            state.append(f"lr {learning_rate:.2g}")
        self.recent.append((now, num_tokens))
        if (elapsed := now - self.recent[0][0]) > 0:
            # The first entry marks the start of the second step; its tokens came before.
            done = sum(tokens for _, tokens in self.recent) - self.recent[0][1]
            state.append(f"{done / elapsed:,.0f} tokens/s")
        self.began = self.began or (now, share_done)
        if share_done > self.began[1]:
            left = (now - self.began[0]) / (share_done - self.began[1]) * (1 - share_done)
            state.append(f"{tqdm.format_interval(left)} left")
        self.line, self.share_done = ", ".join(state), share_done
        self.is_logged = False
        if now - self.drawn_at >= 0.2:
            self._draw(now)
        if now - self.logged_at >= self.seconds_between_lines:
            self._log(now)

    def pause(self) -> None:
        """Exclude the time since the last step from the speed."""
        self.recent.clear()

    def close(self) -> None:
        now = time.monotonic()
        if not self.is_logged:
            self._log(now)
        self._draw(now)
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.close()

    def _draw(self, now: float) -> None:
        if self.bar is not None:
            try:
                self.bar.n = self.share_done
                self.bar.set_description_str(self.line)
            except OSError:
                # The terminal is gone; the training continues.
                self.bar = None
        self.drawn_at = now

    def _log(self, now: float) -> None:
        # With a bar on the console, the line goes to the log file only.
        logger.log(logging.INFO if self.bar is None else logging.DEBUG, self.line)
        self.logged_at, self.is_logged = now, True
