"""What a client's grammar is refused with."""

from __future__ import annotations


class GrammarRefused(Exception):
    """No grammar can be made of what a client asked for."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        self.where = where
