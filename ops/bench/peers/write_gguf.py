"""Writes a small Llama with a byte-level tokenizer as a GGUF file, which llama.cpp reads.

    python write_gguf.py MODEL_DIR FILE

Imports nothing of ours: it runs in llama.cpp's environment.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NORMAL, CONTROL = 1, 3
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
OF_A_LAYER = {
    "self_attn.q_proj.weight": "attn_q",
    "self_attn.k_proj.weight": "attn_k",
    "self_attn.v_proj.weight": "attn_v",
    "self_attn.o_proj.weight": "attn_output",
    "mlp.gate_proj.weight": "ffn_gate",
    "mlp.up_proj.weight": "ffn_up",
    "mlp.down_proj.weight": "ffn_down",
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "ffn_norm",
}


def tensors(path: Path) -> dict[str, Any]:
    """A safetensors file's tensors in float32."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    head = json.loads(content[8 : 8 + size])
    found = {}
    for name, about in head.items():
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]
        data = content[8 + size + first : 8 + size + last]
        if about["dtype"] == "BF16":  # the upper half of a float32
            values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, {"F16": np.float16, "F32": np.float32}[about["dtype"]])
        found[name] = values.astype(np.float32).reshape(about["shape"])
    return found


def pairwise(weight: Any, heads: int) -> Any:
    """Rows of a projection in the order in which llama.cpp turns them: pairs side by side, not half apart."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write(model_dir: Path, path: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)
    _write_tokenizer(writer, model_dir, config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, weight in tensors(model_dir / "model.safetensors").items():
        if name in WHOLE:
            writer.add_tensor(WHOLE[name], weight)
        elif name != "lm_head.weight":  # the same as the embedding
            _, _, layer, part = name.split(".", 3)
            kind = OF_A_LAYER[part]
            turned = pairwise(weight, heads[kind]) if kind in heads else weight
            writer.add_tensor(f"blk.{layer}.{kind}.weight", turned)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer: Any, model_dir: Path, config: dict[str, Any]) -> None:
    found = json.loads((model_dir / "tokenizer.json").read_text())
    words = {number: word for word, number in found["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in found["added_tokens"]}
    ids = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([special.get(number, words.get(number, "")) for number in ids])
    writer.add_token_types([CONTROL if number in special else NORMAL for number in ids])
    # Words are whole tokens here, without merges; llama.cpp refuses an empty list: a pair that no text has.
    writer.add_token_merges(["č ĉ"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((model_dir / "chat_template.jinja").read_text())


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
