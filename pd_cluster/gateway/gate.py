"""Who is in the house: lets requests finish before the gateway ends."""

from __future__ import annotations

import asyncio


class Gate:
    """Counts the requests at work. Once `closing`, no more may come in."""

    def __init__(self) -> None:
        self.closing = False
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def inside(self) -> int:
        return self._inside

    def enter(self) -> None:
        self._inside += 1
        self._empty.clear()

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    async def close(self, timeout_s: float) -> bool:
        """Waits until all have left; False where some are still there after `timeout_s`."""
        self.closing = True
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
