"""Errors that end a benchmark before it has figures."""

from __future__ import annotations


class CannotBench(Exception):
    """A program of ours or an option is not as it should be; the message says what to do."""


class PeerMissing(Exception):
    """A peer is not installed; the message says how to install it."""
