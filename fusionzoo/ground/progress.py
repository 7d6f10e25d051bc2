"""One progress bar: a bar in a terminal, one line in a notebook, a line every 10 s in a log."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Sized
from typing import Any

from tqdm import TqdmWarning, tqdm

# Libraries that import tqdm.auto in a notebook warn there without ipywidgets, which we do not use.
warnings.filterwarnings("ignore", "IProgress not found", TqdmWarning)

EVERY = 10.0  # seconds between two lines of a log
NOTEBOOK_EVERY = 0.5  # seconds between two updates of a notebook's line
LINE = (
    "{desc}{percentage:.0f} % ({n_fmt} of {total_fmt} {unit}s, {elapsed}, {remaining} left,"
    " {rate_fmt}){postfix}"
)
COUNT = "{desc}{n_fmt} {unit}s, {elapsed}, {rate_fmt}"  # without a known total


def progress_bar(
    iterable: Iterable[Any] | None = None,
    *,
    unit: str,
    total: int | None = None,
    initial: int = 0,
    desc: str = "",
    disable: bool = False,
) -> tqdm[Any]:
    """Return a bar over `iterable`, or one that `update` moves, as stderr can show it."""
    settings: dict[str, Any] = {
        "unit": unit,
        "total": total,
        "initial": initial,
        "disable": disable,
    }
    if sys.stderr.isatty():
        return tqdm(iterable, desc=desc or None, dynamic_ncols=True, smoothing=0.05, **settings)
    lines = NotebookBar if in_notebook() else LogBar
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    pattern = COUNT if total is None else LINE
    return lines(iterable, desc=f"{desc}: " if desc else None, bar_format=pattern, **settings)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None


class LineBar(tqdm):  # type: ignore[type-arg]  # tqdm takes no arguments at run time
    """A bar whose state is shown as whole lines: it never moves the cursor."""

    every: float

    def __init__(self, iterable: Any, **settings: Any) -> None:
        self.shown = time.monotonic()  # when a line was shown last; the first one waits as well
        super().__init__(iterable, mininterval=0.1, **settings)

    def show(self, line: str) -> None:
        """Show a line."""
        raise NotImplementedError

    def end(self) -> None:
        """Show what remains when the work is over."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Show the state, unless a line was shown shortly before."""
        now = time.monotonic()
        if now - self.shown >= self.every:
            self.shown = now
            self.show(str(self))

    def clear(self, nolock: bool = False) -> None:
        """Leave lines as they are: nothing was drawn that printing would break."""

    def close(self) -> None:
        """End the bar."""
        if not self.disable:
            self.disable = True
            self._decr_instances(self)  # type: ignore[attr-defined]
            self.end()


class LogBar(LineBar):
    """A line in a log file every 10 seconds; none if the work is shorter."""

    every = EVERY

    def show(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class NotebookBar(LineBar):
    """One line below a notebook's cell, which is replaced as the work goes on, and goes with it."""

    every = NOTEBOOK_EVERY
    handle: Any = None  # of the line, once there is one

    def show(self, line: str) -> None:
        from IPython.display import display

        if self.handle is None:
            self.handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self.handle.update({"text/plain": line}, raw=True)

    def end(self) -> None:
        if self.handle is not None:
            self.handle.update({"text/plain": ""}, raw=True)
