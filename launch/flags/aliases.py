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
    "chat-template-file": "chat-template",  # llama.cpp
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

# The parts of --http as flags of vLLM, SGLang, transformers and llama.cpp, and what one is if only the other is given.
ADDRESS = {"--host": "", "--port": "8000"}

_ADDRESS = "--http HOST:PORT"
_MEMORY = "--kv-memory-fraction, of what the weights leave"
_GUESSES = "--num-speculative-tokens"
_BATCH = "--max-num-batched-tokens"
_NOTHING = "not needed"
_TOKENIZER = "the tokenizer in the model's folder"
_DOWNLOAD = "hf download, then --model DIR"
_CODE = "code of a checkpoint is never run"
_REPLICAS = "replicas behind a router, see docs/scaling.md"
_FIELD = "a field of each request"
_DEFAULTS = "generation_config.json in the model's folder"

# Not accepted, as their values or defaults differ, and what does the same here; docs/coming-from.md has the same table.
# Short ones are without a dash too.
INSTEAD = {
    "uds": "--http unix:PATH",  # vLLM
    "api-server-count": "--http-workers",  # vLLM
    "threads-http": "--http-workers",  # llama.cpp
    "alias": "--served-model-name",  # llama.cpp
    "a": "--served-model-name",
    "ssl-cert-reqs": "--ssl-ca-certs",  # vLLM
    "allowed-origins": "--allowed-origin, several times",  # vLLM
    "log-requests": "--log-level",  # SGLang
    "log-level-http": "--log-level",
    "uvicorn-log-level": "--log-level",  # vLLM
    "enable-log-requests": "--log-level",
    "disable-log-requests": "--log-level",
    "disable-log-stats": "--log-level",
    "m": "--model",  # llama.cpp
    "ctx-size": "--max-model-len",  # llama.cpp
    "c": "--max-model-len",
    "split-mode": "--tensor-parallel-size",  # llama.cpp
    "parallel": "--max-num-seqs",  # llama.cpp
    "np": "--max-num-seqs",
    "cb-max-batch-tokens": _BATCH,  # transformers
    "max-prefill-tokens": _BATCH,  # SGLang
    "batch-size": _BATCH,  # llama.cpp
    "b": _BATCH,
    "ubatch-size": "--prefill-chunk",  # llama.cpp
    "ub": "--prefill-chunk",
    "long-prefill-token-threshold": "--prefill-chunk",  # vLLM
    "cb-block-size": "--page-size",  # transformers
    "cb-num-blocks": "--num-pages",  # transformers
    "max-total-tokens": "--num-pages",  # SGLang
    **dict.fromkeys(("cache-type-k", "cache-type-v", "ctk", "ctv"), "--kv-dtype"),  # llama.cpp
    "gpu-memory-utilization": _MEMORY,  # vLLM
    "mem-fraction-static": _MEMORY,  # SGLang
    "cb-max-memory-percent": _MEMORY,  # transformers
    "swap-space": "--host-pages",  # vLLM
    "no-cache-prompt": "--no-prefix-cache",  # llama.cpp
    "scheduling-policy": "--policy",  # vLLM
    "schedule-policy": "--policy",  # SGLang
    "enable-priority-scheduling": "--policy priority",  # SGLang
    "enforce-eager": "--no-cuda-graphs",  # vLLM
    "disable-cuda-graph": "--no-cuda-graphs",  # SGLang
    "no-cb-use-cuda-graph": "--no-cuda-graphs",  # transformers
    "no-async-scheduling": "--no-overlap",  # vLLM
    "disable-overlap-schedule": "--no-overlap",  # SGLang
    "model-impl": "--backend",  # vLLM, SGLang
    "enable-deterministic-inference": "--deterministic",  # SGLang
    "speculative-config": f"{_GUESSES} or --draft-model",  # vLLM
    "speculative-algorithm": _GUESSES,  # SGLang
    "spec-type": _GUESSES,  # llama.cpp
    "md": "--draft-model",  # llama.cpp
    "q": "--quantization",  # vLLM
    "t": "--threads",  # llama.cpp
    **dict.fromkeys(("n-gpu-layers", "gpu-layers", "ngl"), "--device, of all layers"),  # llama.cpp
    "reasoning-format": "--reasoning-parser",  # llama.cpp
    **dict.fromkeys(("predict", "n-predict", "n"), "--max-tokens"),  # llama.cpp
    "tokenizer": _TOKENIZER,  # vLLM
    "tokenizer-mode": _TOKENIZER,  # vLLM, SGLang
    "tokenizer-path": _TOKENIZER,  # SGLang
    **dict.fromkeys(("revision", "download-dir"), _DOWNLOAD),  # vLLM, SGLang
    **dict.fromkeys(("hf-repo", "hf"), _DOWNLOAD),  # llama.cpp
    "trust-remote-code": _CODE,  # vLLM, SGLang, transformers
    **dict.fromkeys(("data-parallel-size", "pipeline-parallel-size", "dp", "pp"), _REPLICAS),  # vLLM, SGLang
    "dp-size": _REPLICAS,  # SGLang
    "seed": _FIELD,  # vLLM, llama.cpp
    "random-seed": _FIELD,  # SGLang
    "chat-template-kwargs": _FIELD,  # llama.cpp
    "default-chat-template-kwargs": _FIELD,  # vLLM
    "override-generation-config": _DEFAULTS,  # vLLM
    "preferred-sampling-params": _DEFAULTS,  # SGLang
    **dict.fromkeys(("top-k", "top-p", "min-p"), _FIELD),  # llama.cpp
    "temp": f"temperature, {_FIELD}",  # llama.cpp
    "repeat-penalty": f"repetition_penalty, {_FIELD}",  # llama.cpp
    **dict.fromkeys(
        (
            "enable-ssl-refresh", "enable-lora", "max-loras", "max-lora-rank", "max-cpu-loras", "enable-prefix-caching",
            "enable-chunked-prefill", "enable-auto-tool-choice", "runner", "task", "convert", "async-scheduling",
            "load-format", "enable-prompt-tokens-details",
        ),
        _NOTHING,
    ),  # vLLM
    **dict.fromkeys(
        ("is-embedding", "enable-metrics", "max-loras-per-batch", "enable-mixed-chunk", "enable-cache-report"), _NOTHING
    ),  # SGLang
    **dict.fromkeys(
        (
            "embeddings", "embedding", "rerank", "reranking", "metrics", "slots", "props", "jinja", "cont-batching",
            "cb", "flash-attn", "fa",
        ),
        _NOTHING,
    ),  # llama.cpp
}  # fmt: skip

# The same for Hugging Face's TGI, in a list below that table.
OF_TGI = {
    "model-id": "--model",
    "num-shard": "--tensor-parallel-size",
    "hostname": _ADDRESS,
    "quantize": "--quantization",
    "max-batch-prefill-tokens": _BATCH,
    "max-batch-total-tokens": "--num-pages",
    "max-batch-size": "--max-num-seqs",
    "max-concurrent-requests": "--max-queue",
    "cuda-memory-fraction": _MEMORY,
    "speculate": _GUESSES,
    "lora-adapters": "--lora-modules",
    "cors-allow-origin": "--allowed-origin",
    "json-output": "--log-format json",
    "otlp-endpoint": "--otlp-traces-endpoint",
    "payload-limit": "--max-body-bytes",
}
INSTEAD |= OF_TGI

# Commands of others, and what does the same here.
COMMANDS = {
    "run": "triptych chat --model MODEL",  # Ollama
    "ps": "triptych top",
    "complete": "triptych generate",  # vLLM
    "collect-env": "triptych info",
    "env": "triptych info",  # transformers
    **dict.fromkeys(("pull", "download"), "hf download MODEL --local-dir DIR"),  # Ollama, transformers
}

# Short forms, by option.
SHORT = {"tensor_parallel_size": "-tp"}  # vLLM


def canonical(name: str) -> str:
    """Our own name of a flag given in another server's spelling; for click's ``token_normalize_func``."""
    return ALIASES.get(name, name)
