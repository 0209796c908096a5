"""Runs llama.cpp's own HTTP server until it is ended.

    python run_llama_cpp.py FILE.gguf PORT NAME [embeddings]

Imports nothing of ours: it runs in llama.cpp's environment.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main() -> None:
    path, port, name, *more = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.model_alias = {name}
    params.port = int(port)
    params.n_ctx = 4096
    params.n_parallel = 2
    params.cpuparams.n_threads = 1
    params.use_jinja = True
    if more == ["embeddings"]:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
