"""Every act is of a kind that can be asked for."""

from __future__ import annotations

import re
from pathlib import Path

from tenants.resources.all import RESOURCES
from tenants.resources.records.audit import KINDS

ROOT = Path(__file__).parents[4]
ACT = r'(?:actor, |request, |by, |note\(|said, |Access\(|(?:action|ACTION) = )"([a-z_]+)\.[a-z_]+"'


def test_every_act_is_of_a_known_kind() -> None:
    """An act of a new kind: add the kind to `KINDS`."""
    found = {
        kind
        for package in ("gateway", "ops", "tenants")
        for path in (ROOT / package).rglob("*.py")
        for kind in re.findall(ACT, path.read_text())
    }
    declared = {act.name.partition(".")[0] for one in RESOURCES for act in one.acts}
    assert found | declared == set(KINDS)
