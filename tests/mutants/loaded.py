"""Pytest plug-in of `make mutants`: a run in which the mutant's file was not the one that was loaded is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def pytest_sessionfinish() -> None:
    """Ends with 7 where the file came from another tree, or is a kernel's and was not loaded at all."""
    mutant = os.environ["FAIRGATE_MUTANT"]
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    loaded = {Path(file).resolve() for file in files if file.endswith(f"/{mutant}")}
    if loaded - {Path(mutant).resolve()} or (mutant.startswith("kernels/gpu/") and not loaded):
        pytest.exit(f"loaded was {loaded or 'nothing'}, not the mutant of {mutant}", returncode=7)
