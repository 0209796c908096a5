"""All that an engine imports before it serves, made once for the processes that are forked from this one.

Numba fills its registries at the first compiled function, transformers imports a model's family at its first
load: both take a process longer than to load the tiny model.
"""

# ruff: noqa: F401
import gc

import pytest  # multiprocessing imports the main module in each fork: `pytest.__main__`
import transformers.models.llama.modeling_llama
from numba.core.registry import cpu_target

import engine.model.loader
import engine.model.probe_attachment
import engine.process.server
import kernels.cpu.decoder
import kernels.cpu.layers
import kernels.cpu.products

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
# What is shared with a fork is not walked by its collector, which would copy it.
gc.collect()
gc.freeze()
