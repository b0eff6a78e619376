"""In which order the transfers to and from one peer go: in portions, requests in turn, up to a
number of bytes at once.

    request A  ■■■■■■         portions of at most a quarter of the limit, so that a long prompt
    request B  ■■             holds up a short one by a portion, not by all of itself
    in flight  A B A
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

# A request's turn is this part of what may be in flight.
_SHARE: Final = 4


class Portion(NamedTuple):
    """`pages` pages of a transfer, from its page `first` on."""

    transfer: int
    first: int
    pages: int


@dataclass(eq=False)
class _Transfer:
    id: int
    pages: int
    next: int = 0
    in_flight: int = 0
    error: str = ""


@dataclass(eq=False)
class TransferQueue:
    """
    Args:
        max_pages: in flight at once; a portion that alone has more goes by itself.
    """

    max_pages: int
    in_flight: int = 0  # pages
    _transfers: dict[int, _Transfer] = field(default_factory=dict)
    # Who has portions to send: the next in turn first, and of each the oldest transfer first.
    _waiting: dict[Hashable, deque[_Transfer]] = field(default_factory=dict)

    def __contains__(self, transfer: int) -> bool:
        return transfer in self._transfers

    def __len__(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    def add(self, transfer: int, owner: Hashable, pages: int) -> None:
        """A transfer of `pages` > 0 pages for the request `owner`."""
        assert pages > 0
        assert transfer not in self._transfers
        known = self._transfers[transfer] = _Transfer(transfer, pages)
        self._waiting.setdefault(owner, deque()).append(known)

    def next(self) -> Portion | None:
        """What to start now, counted as in flight from here on; None if that must wait."""
        if not self._waiting:
            return None
        owner, transfers = next(iter(self._waiting.items()))
        transfer = transfers[0]
        count = min(max(1, self.max_pages // _SHARE), transfer.pages - transfer.next)
        if self.in_flight and self.in_flight + count > self.max_pages:
            return None
        portion = Portion(transfer.id, transfer.next, count)
        transfer.next += count
        transfer.in_flight += count
        self.in_flight += count
        if transfer.next == transfer.pages:
            transfers.popleft()
        del self._waiting[owner]
        if transfers:
            self._waiting[owner] = transfers
        return portion

    def ended(self, portion: Portion, error: str = "") -> str | None:
        """A portion is over. The transfer's error, "" for none, if all of it is over, else None.

        After an error no further portion of the transfer is started.
        """
        transfer = self._transfers[portion.transfer]
        transfer.in_flight -= portion.pages
        self.in_flight -= portion.pages
        if error:
            self._give_up(transfer, error)
        return self._over(transfer)

    def stop(self, transfer: int, error: str) -> str | None:
        """Start no more of a transfer: `error`, if that is how it ends here and now, else None.

        One of which all had been started ends as its last portion does.
        """
        known = self._transfers[transfer]
        if known.next < known.pages:
            self._give_up(known, error)
        return self._over(known)

    def _give_up(self, transfer: _Transfer, error: str) -> None:
        transfer.error = transfer.error or error
        transfer.next = transfer.pages
        for owner, transfers in list(self._waiting.items()):
            if transfer in transfers:
                transfers.remove(transfer)
                if not transfers:
                    del self._waiting[owner]

    def _over(self, transfer: _Transfer) -> str | None:
        if transfer.in_flight or transfer.next < transfer.pages:
            return None
        del self._transfers[transfer.id]
        return transfer.error
