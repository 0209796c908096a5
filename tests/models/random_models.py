"""Small random models for the engine's exactness and refusals.

Each `<name>.json` beside this file is a transformers config. Its weights are drawn here, seeded, and wide:
with the usual narrow initialisation a random model repeats one token for ever, and equality of two such
outputs says nothing. The mixtures of experts use all their experts for each token: a router that has to
choose is torn at ties which the logits do not show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

CONFIG_DIR = Path(__file__).parent
WEIGHT_SPREAD = 0.3
"""Standard deviation of the matrices; transformers' usual 0.02 gives near-constant logits."""
TIED_EMBEDDING_SPREAD = 0.1
"""An embedding that is the output layer too and dominates the residual would only repeat its input."""


def save_random_model(
    name: str, model_dir: Path, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Writes the model `name` with random weights to `model_dir` and returns it; `changes`: its config."""
    config = transformers.AutoConfig.from_pretrained(CONFIG_DIR / f"{name}.json", **changes)
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter is model.get_output_embeddings().weight and config.tie_word_embeddings:
                    parameter.normal_(0.0, TIED_EMBEDDING_SPREAD)
                elif parameter.ndim > 1:
                    parameter.normal_(0.0, WEIGHT_SPREAD)
                elif "norm" in key or "ln_" in key:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:  # biases, which start at zero, and attention sinks
                    parameter.normal_(0.0, WEIGHT_SPREAD)
    model.to(dtype).save_pretrained(model_dir)
    return model_dir
