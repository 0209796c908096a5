"""Texts of the Lua scripts, with the shared code before each."""

from __future__ import annotations

from pathlib import Path

_LUA = Path(__file__).parent / "lua"
_SHARED = ("server", "common")


def server() -> str:
    """Helpers for scripts, also of other packages: the server's clock, and numbers as text."""
    return _text("server")


def scripts() -> dict[str, str]:
    """Script texts of the quota store's operations, by name."""
    before = "".join(_text(name) for name in _SHARED)
    return {path.stem: before + _text(path.stem) for path in _LUA.glob("*.lua") if path.stem not in _SHARED}


def _text(name: str) -> str:
    return (_LUA / f"{name}.lua").read_text(encoding="utf-8")
