"""Alternative names of flags, known from other servers."""

from __future__ import annotations

# Accepted wherever our own flag is.
ALIASES = {
    "model-path": "model",  # SGLang
    "tp-size": "tensor-parallel-size",  # SGLang
    "tp": "tensor-parallel-size",  # SGLang
    "context-length": "max-model-len",  # SGLang
    "block-size": "page-size",  # vLLM
    "kv-cache-dtype": "kv-dtype",  # vLLM, SGLang
    "num-gpu-blocks-override": "num-pages",  # vLLM
    "no-enable-prefix-caching": "no-prefix-cache",  # vLLM
    "disable-radix-cache": "no-prefix-cache",  # SGLang
    "lora-paths": "lora-modules",  # SGLang
    "speculative-draft-model-path": "draft-model",  # SGLang
    "model-draft": "draft-model",  # llama.cpp
    "draft-max": "num-speculative-tokens",  # llama.cpp
    "max-running-requests": "max-num-seqs",  # SGLang
    "chunked-prefill-size": "prefill-chunk",  # SGLang
    "max-queued-requests": "max-queue",  # SGLang
    "shutdown-timeout": "drain-timeout",  # vLLM
    "tool-call-parser": "tool-parser",  # vLLM, SGLang
    "max-new-tokens": "max-tokens",  # transformers
}

# Short forms, by option.
SHORT = {"tensor_parallel_size": "-tp"}  # vLLM


def canonical(name: str) -> str:
    """Our own name of a flag given in another server's spelling; for click's ``token_normalize_func``."""
    return ALIASES.get(name, name)
