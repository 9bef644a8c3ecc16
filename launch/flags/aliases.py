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
    "generation-config": "sampling-defaults",  # vLLM
    "ssl-cert-file": "ssl-certfile",  # llama.cpp
    "ssl-key-file": "ssl-keyfile",  # llama.cpp
    "max-new-tokens": "max-tokens",  # transformers
}

_ADDRESS = "--http HOST:PORT"
_MEMORY = "--kv-memory-fraction, of what the weights leave"
_GUESSES = "--num-speculative-tokens"
_NOTHING = "not needed"

# Not accepted, as their values or defaults differ, and what does the same here; docs/coming-from.md has the same table.
INSTEAD = {
    "host": _ADDRESS,  # vLLM, SGLang, transformers, llama.cpp
    "port": _ADDRESS,
    "api-server-count": "--http-workers",  # vLLM
    "threads-http": "--http-workers",  # llama.cpp
    "alias": "--served-model-name",  # llama.cpp
    "ssl-cert-reqs": "--ssl-ca-certs",  # vLLM
    "allowed-origins": "--allowed-origin, several times",  # vLLM
    "ctx-size": "--max-model-len",  # llama.cpp
    "split-mode": "--tensor-parallel-size",  # llama.cpp
    "parallel": "--max-num-seqs",  # llama.cpp
    "cb-max-batch-tokens": "--max-num-batched-tokens",  # transformers
    "batch-size": "--max-num-batched-tokens",  # llama.cpp
    "ubatch-size": "--prefill-chunk",  # llama.cpp
    "cb-block-size": "--page-size",  # transformers
    "cb-num-blocks": "--num-pages",  # transformers
    "cache-type-k": "--kv-dtype",  # llama.cpp
    "cache-type-v": "--kv-dtype",  # llama.cpp
    "gpu-memory-utilization": _MEMORY,  # vLLM
    "mem-fraction-static": _MEMORY,  # SGLang
    "cb-max-memory-percent": _MEMORY,  # transformers
    "no-cache-prompt": "--no-prefix-cache",  # llama.cpp
    "scheduling-policy": "--policy",  # vLLM
    "schedule-policy": "--policy",  # SGLang
    "enforce-eager": "--no-cuda-graphs",  # vLLM
    "disable-cuda-graph": "--no-cuda-graphs",  # SGLang
    "no-cb-use-cuda-graph": "--no-cuda-graphs",  # transformers
    "enable-deterministic-inference": "--deterministic",  # SGLang
    "speculative-config": f"{_GUESSES} or --draft-model",  # vLLM
    "speculative-algorithm": _GUESSES,  # SGLang
    "spec-type": _GUESSES,  # llama.cpp
    "reasoning-format": "--reasoning-parser",  # llama.cpp
    "predict": "--max-tokens",  # llama.cpp
    "enable-ssl-refresh": _NOTHING,  # vLLM
    "enable-lora": _NOTHING,  # vLLM, SGLang
    "enable-prefix-caching": _NOTHING,  # vLLM
    "enable-chunked-prefill": _NOTHING,  # vLLM
    "enable-auto-tool-choice": _NOTHING,  # vLLM
    "runner": _NOTHING,  # vLLM, for embeddings
    "is-embedding": _NOTHING,  # SGLang
    "embeddings": _NOTHING,  # llama.cpp
    "enable-metrics": _NOTHING,  # SGLang
    "metrics": _NOTHING,  # llama.cpp
    "slots": _NOTHING,  # llama.cpp
    "jinja": _NOTHING,  # llama.cpp
}

# Short forms, by option.
SHORT = {"tensor_parallel_size": "-tp"}  # vLLM


def canonical(name: str) -> str:
    """Our own name of a flag given in another server's spelling; for click's ``token_normalize_func``."""
    return ALIASES.get(name, name)
