"""The names of samples, as a sequence that looks a name up when it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import overload


class Names(Sequence[str], ABC):
    """Names of samples; subclasses look up a single one."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        return self._name(index % len(self))

    @abstractmethod
    def _name(self, index: int) -> str:
        """The name at `index`, from 0 to `len(self)` - 1."""

    @abstractmethod
    def checksum(self) -> int:
        """A CRC-32 that changes with any name or with their order."""
