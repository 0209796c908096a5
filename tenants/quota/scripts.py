"""Which Lua scripts are there, and what is sent before each?"""

from __future__ import annotations

from pathlib import Path

_LUA = Path(__file__).parent / "lua"
_SHARED = ("server", "common")


def server() -> str:
    """What scripts need of the server, also those of other packages: its clock, and numbers as text."""
    return _text("server")


def scripts() -> dict[str, str]:
    """The text of each operation of the quota store, by its name."""
    before = "".join(_text(name) for name in _SHARED)
    return {path.stem: before + _text(path.stem) for path in _LUA.glob("*.lua") if path.stem not in _SHARED}


def _text(name: str) -> str:
    return (_LUA / f"{name}.lua").read_text(encoding="utf-8")
