"""Who owns which page of a worker's KV memory.

    allocate            publish              lock / unlock
  free ────► private ──────────► evictable ◄────────────► protected
    ▲          │ free                │ evict
    └──────────┴─────────────────────┘      (through quarantine while a transfer reads or writes it)

Being in flight is counted beside that: any page but a free one may be read or written by transfers,
and then counts as in flight whatever else it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Pages: TypeAlias = NDArray[np.int32]

# What a page may be without an owner comes first: `state < _PRIVATE` means nobody owns it.
_FREE: Final = 0
_QUARANTINED: Final = 1
_PRIVATE: Final = 2
_PROTECTED: Final = 3
_EVICTABLE: Final = 4
_STATE_NAMES: Final = ("free", "quarantined", "private", "protected", "evictable")


_Index: TypeAlias = NDArray[np.intp]


class OutOfPages(Exception):
    """More pages were asked for than can be had. Nothing was taken and nothing evicted.

    `needed` is the number asked for, `free` the number that could have been given.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages needed, {free} to be had")
        self.needed = needed
        self.free = free


class PageStateError(RuntimeError):
    """A page was not in the state that the call needs, e.g. it was freed twice."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; they sum to the pool."""

    free: int
    private: int
    in_flight: int
    protected: int
    evictable: int


class PagePool:
    """Page numbers `0 .. num_pages - 1` and the state of each. Arrays of pages are int32, 1-D."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self.num_pages = num_pages
        self._state = np.zeros(num_pages, np.uint8)
        self._flights = np.zeros(num_pages, np.int32)
        # Pages by state, those in flight left out.
        self._idle = [num_pages, 0, 0, 0, 0]
        self._in_flight = 0
        # Free pages: sorted ones ready to be given, from `_head` on, and those that came back since
        # they were sorted. A merge happens only when the ready ones are used up, so each page pays
        # for one sort between two uses of it.
        self._ready = np.arange(num_pages, dtype=np.int32)
        self._head = 0
        self._returned: list[Pages] = []
        self._scratch = np.empty(num_pages, np.int32)

    @property
    def free_count(self) -> int:
        return self._idle[_FREE]

    @property
    def evictable_count(self) -> int:
        """Pages that eviction would free at once: those in flight left out."""
        return self._idle[_EVICTABLE]

    def counts(self) -> PageCounts:
        idle = self._idle
        return PageCounts(
            free=idle[_FREE],
            private=idle[_PRIVATE],
            in_flight=self._in_flight,
            protected=idle[_PROTECTED],
            evictable=idle[_EVICTABLE],
        )

    def allocate(self, n: int) -> Pages:
        """Take `n` free pages, which become private; ids in runs as long as cheaply found.

        Raises:
            OutOfPages: fewer than `n` pages are free.
        """
        if n > self._idle[_FREE]:
            raise OutOfPages(n, self._idle[_FREE])
        if n > self._ready.size - self._head:
            self._merge_returned()
        pages = self._take(n)
        self._state[_index(pages)] = _PRIVATE
        self._idle[_FREE] -= n
        self._idle[_PRIVATE] += n
        return pages

    def free(self, pages: Pages) -> None:
        """Give private pages back; one in flight becomes free when its last flight ends.

        Raises:
            PageStateError: a page is not private, or is named twice.
        """
        index = _index(pages)
        self._require_distinct(pages, index, "freed")
        # A copy, for the pool keeps it and the caller may go on using its own.
        self._give_back(pages.copy(), index, _PRIVATE, "freed")

    def begin_flight(self, pages: Pages) -> None:
        """A transfer starts to read or write these pages. Flights of one page are counted.

        Raises:
            PageStateError: nobody owns a page, or a page is named twice.
        """
        index = _index(pages)
        self._require_distinct(pages, index, "put in flight")
        states = self._state[index]
        ownerless = states < _PRIVATE
        if np.count_nonzero(ownerless):
            raise self._misuse(pages, ownerless, "put in flight")
        flights = self._flights[index]
        departing = states[flights == 0]
        self._flights[index] = flights + 1
        for state, count in enumerate(np.bincount(departing, minlength=5).tolist()):
            self._idle[state] -= count
        self._in_flight += departing.size

    def end_flight(self, pages: Pages) -> None:
        """A transfer is over, and nothing of it can touch these pages any more.

        Raises:
            PageStateError: a page is not in flight, or is named twice.
        """
        index = _index(pages)
        self._require_distinct(pages, index, "landed")
        flights = self._flights[index]
        grounded = flights == 0
        if np.count_nonzero(grounded):
            raise self._misuse(pages, grounded, "landed")
        self._flights[index] = flights - 1
        landed = index[flights == 1]
        self._in_flight -= landed.size
        states = self._state[landed]
        ownerless = states == _QUARANTINED
        if np.count_nonzero(ownerless):
            freed = landed[ownerless]
            self._state[freed] = _FREE
            self._returned.append(freed.astype(np.int32))
            states[ownerless] = _FREE
        for state, count in enumerate(np.bincount(states, minlength=5).tolist()):
            self._idle[state] += count

    # The following four are for the owner of the radix tree.

    def publish(self, pages: Pages) -> None:
        """Private pages enter the tree, unlocked.

        Raises:
            PageStateError: a page is not private, or is named twice.
        """
        index = _index(pages)
        self._require_distinct(pages, index, "published")
        self._move(pages, index, _PRIVATE, _EVICTABLE, "published")

    def protect(self, pages: Pages) -> None:
        self._move(pages, _index(pages), _EVICTABLE, _PROTECTED, "protected")

    def unprotect(self, pages: Pages) -> None:
        self._move(pages, _index(pages), _PROTECTED, _EVICTABLE, "unprotected")

    def evict(self, pages: Pages) -> int:
        """Unlocked pages leave the tree; keeps the array. Returns how many are free at once."""
        return self._give_back(pages, _index(pages), _EVICTABLE, "evicted")

    def count_idle(self, pages: Pages) -> int:
        """How many of these pages are not in flight."""
        return self._count_idle(_index(pages)) if self._in_flight else pages.size

    def validate(self) -> None:
        """Check every invariant of the pool; O(num_pages)."""
        assert (self._flights >= 0).all()
        flying = self._flights > 0
        assert self._in_flight == int(flying.sum())
        assert self._idle == np.bincount(self._state[~flying], minlength=5).tolist()
        assert self._idle[_QUARANTINED] == 0, "a quarantined page is in flight"
        assert not (flying & (self._state == _FREE)).any(), "a free page is in flight"
        assert min(self._idle) >= 0
        assert sum(self._idle) + self._in_flight == self.num_pages
        listed = np.concatenate([self._ready[self._head :], *self._returned])
        assert np.array_equal(np.sort(listed), np.flatnonzero(self._state == _FREE))
        assert (np.diff(self._ready[self._head :]) > 0).all()

    def tree_pages(self) -> tuple[Pages, Pages]:
        """(protected, evictable) pages in ascending order, in flight or not; O(num_pages)."""
        protected = np.flatnonzero(self._state == _PROTECTED).astype(np.int32)
        evictable = np.flatnonzero(self._state == _EVICTABLE).astype(np.int32)
        return protected, evictable

    def _take(self, n: int) -> Pages:
        ready = self._ready[self._head :]
        at = 0
        if n > 1 and ready[n - 1] - ready[0] != n - 1:
            # No run in front: among the next few, the n pages that lie closest together.
            window = ready[: 4 * n + 64]
            at = int((window[n - 1 :] - window[: window.size - n + 1]).argmin())
        pages = ready[at : at + n].copy()
        if at:
            ready[n : n + at] = ready[:at].copy()
        self._head += n
        return pages

    def _merge_returned(self) -> None:
        merged = np.concatenate([self._ready[self._head :], *self._returned])
        merged.sort()
        self._ready = merged
        self._head = 0
        self._returned.clear()

    def _move(self, pages: Pages, index: _Index, old: int, new: int, verb: str) -> None:
        wrong = self._state[index] != old
        if np.count_nonzero(wrong):
            raise self._misuse(pages, wrong, verb)
        self._state[index] = new
        idle = self._count_idle(index)
        self._idle[old] -= idle
        self._idle[new] += idle

    def _count_idle(self, index: _Index) -> int:
        if not self._in_flight:
            return index.size
        return index.size - int(np.count_nonzero(self._flights[index]))

    def _give_back(self, pages: Pages, index: _Index, old: int, verb: str) -> int:
        self._move(pages, index, old, _FREE, verb)
        freed = pages
        if self._in_flight:
            flying = self._flights[index] > 0
            self._state[index[flying]] = _QUARANTINED
            freed = pages[~flying]
        if freed.size:
            self._returned.append(freed)
        return freed.size

    def _require_distinct(self, pages: Pages, index: _Index, verb: str) -> None:
        places = np.arange(pages.size, dtype=np.int32)
        self._scratch[index] = places
        twice = self._scratch[index] != places
        if np.count_nonzero(twice):
            raise PageStateError(f"page {int(pages[twice][0])} cannot be {verb}: it is named twice")

    def _misuse(self, pages: Pages, wrong: NDArray[np.bool_], verb: str) -> PageStateError:
        page = int(pages[wrong][0])
        state = _STATE_NAMES[int(self._state[page])]
        return PageStateError(
            f"page {page} cannot be {verb}: it is {state}, in {int(self._flights[page])} flights"
        )


def _index(pages: Pages) -> _Index:
    """The pages to index arrays with, which is four times as fast as with int32.

    By way of unsigned, so that a negative number is out of range and not counted from the end.
    """
    assert pages.dtype == np.int32
    return pages.view(np.uint32).astype(np.intp)
