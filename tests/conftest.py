"""What all tests share: Hypothesis profiles, and collection that is cheap.

Fixtures are in plugins (`tests/support/database_fixtures.py`, `server_fixtures.py`) that folders register.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, Phase, settings

# Before Triton is imported: its kernels run in its interpreter, on a CPU, as they are compiled for a GPU.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

#: For `make mutants`: one failure is enough, and it must be the broken rule's, not that of a busy machine.
settings.register_profile(
    "mutants",
    phases=(Phase.explicit, Phase.generate),
    database=None,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)

#: For `make fuzz`: other random inputs in every run, and many. Tests of parsers leave the number of examples
#: to the profile; twins and histories have their own.
settings.register_profile(
    "fuzz",
    max_examples=10_000,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

#: The same examples in every run, however long they take: what a suite says of a commit depends neither on
#: luck nor on the machine's speed. `--hypothesis-profile default` looks elsewhere.
settings.register_profile(
    "suite",
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """HTTP clients load all certificate authorities that they trust, each time, which takes longer than most
    requests of a test. No test speaks TLS: here, and in the processes that tests start, they trust one."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text().partition(end)
    directory = tempfile.TemporaryDirectory(prefix="fairgate-tests")
    config.add_cleanup(directory.cleanup)
    trusted = Path(directory.name) / "authority.pem"
    trusted.write_text(first + end)
    os.environ["SSL_CERT_FILE"] = str(trusted)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the collector of cycles, which would walk all modules again and again, and find nothing."""
    gc.disable()
    try:
        return (yield)  # type: ignore[return-value]
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Frozen objects outlive the interpreter, and Triton names each of its own: hundreds of lines."""
    gc.unfreeze()
