"""Which version of the weights drew each token of a response whose weights change while it is generated."""

from __future__ import annotations


class VersionLog:
    """`first` drew the first token; each of `changes` is (position of the first token it drew, version)."""

    __slots__ = ("changes", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self.changes: list[tuple[int, int]] = []

    def change(self, drawn: int, version: int) -> None:
        """The weights are those of `version` from now on, when `drawn` tokens are there."""
        if self.changes and self.changes[-1][0] == drawn:
            self.changes.pop()  # that version drew nothing
        newest = self.changes[-1][1] if self.changes else self.first
        if drawn == 0:
            self.first = version
        elif version != newest:
            self.changes.append((drawn, version))

    def within(self, count: int) -> list[tuple[int, int]]:
        """The changes among the first `count` tokens."""
        return [(position, version) for position, version in self.changes if position < count]
