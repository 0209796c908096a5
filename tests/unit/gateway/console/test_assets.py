"""Files of others are the ones that the list names, and all of them are on it."""

from __future__ import annotations

import hashlib
import json

from gateway.console.assets import FOLDER, address

VENDORED = FOLDER / "vendor"


def test_each_vendored_file_has_its_hash_and_its_licence() -> None:
    packages = json.loads((VENDORED / "vendored.json").read_text())
    listed = {each["file"]: each["sha256"] for package in packages for each in package["files"]}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDORED.iterdir()}
    licences = {name for name in found if name.endswith(".LICENSE")}
    assert {name: found[name] for name in listed} == listed
    assert set(found) - set(listed) - licences == {"vendored.json"}
    assert {
        package["name"].strip("@").partition("/")[0].partition(".")[0].lower() for package in packages
    } == {name.partition(".")[0].lower() for name in licences}
    assert all(package["licence"] in ("MIT", "0BSD") for package in packages)


def test_every_file_that_pages_name_is_served() -> None:
    assert address("htmx.min.js").startswith("/console/assets/htmx.min.")
