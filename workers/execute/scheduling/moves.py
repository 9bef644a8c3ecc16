"""Page copies to do before a step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """Pages to copy before a forward pass, all of ``swap_out`` first, then ``copies``, then ``swap_in``.

    Everything read was in place before the step. A page that is read may be written by a later move, but never by an
    earlier one: each group is done in order, or reads everything before it writes. A step never swaps out *and* in.
    """

    swap_out: Pairs = ()  # (device page, host page)
    copies: Pairs = ()  # (device page to read, device page to write)
    swap_in: Pairs = ()  # (device page, host page)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copies or self.swap_in)


NO_MOVES = Moves()


@dataclass(slots=True)
class MovesDraft:
    """The moves of a step that is being planned."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # device page to write -> device page to read
    swap_in: dict[int, int] = field(default_factory=dict)  # device page -> host page

    def forget(self, pages: list[int]) -> None:
        """These pages are reallocated within the step: drop the planned writes to them."""
        for page in pages:
            self.copies.pop(page, None)
            self.swap_in.pop(page, None)

    def swap(self, page: int, host_page: int) -> None:
        """Move a page to the host; also if the content of ``page`` is itself still to be copied there."""
        self.swap_out.append((self.copies.get(page, page), host_page))

    def copy(self, source: int, target: int) -> None:
        """Copy a page; also if the content of ``source`` is itself still to be moved there."""
        source = self.copies.get(source, source)
        if source in self.swap_in:
            self.swap_in[target] = self.swap_in[source]
        else:
            self.copies[target] = source

    def finish(self) -> Moves:
        if not (self.swap_out or self.copies or self.swap_in):
            return NO_MOVES
        copies = tuple((source, target) for target, source in self.copies.items())
        return Moves(tuple(self.swap_out), copies, tuple(self.swap_in.items()))
