"""Settings of the HTTP gateway. Cheap to import: the command line derives flags from it."""

from __future__ import annotations

import hmac
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from ...protocol.config import ModelConfig
from ...protocol.errors import ConfigError
from ...protocol.home import mode_of
from ...protocol.service_config import MAX_LEASE_S, MIN_LEASE_S
from ...protocol.settings import between, one_of, option
from ..terminal.not_utf8 import why_file_not_utf8

LOG_FORMATS = ("text", "json")
SAMPLING_DEFAULTS = ("model", "openai")
SAMPLING_DEFAULTS_OF_VLLM = {"auto": "model", "vllm": "openai"}  # what its --generation-config calls them
TOOL_PARSERS = (
    "auto", "apertus", "cohere", "deepseek", "gemma", "glm45", "granite", "harmony", "hermes", "hunyuan", "internlm",
    "jamba", "lfm2", "llama3_json", "minimax", "mistral", "nemotron", "olmo3", "pythonic", "qwen3_coder", "seed_oss",
    "xlam", "none",
)  # fmt: skip
REASONING_PARSERS = ("auto", "harmony", "think", "none")
# The names of these formats in other servers, where they differ.
PARSERS_OF_VLLM = {
    "deepseek_v3": "deepseek", "deepseek_v31": "deepseek", "ernie45": "hermes", "functiongemma": "gemma",
    "glm47": "glm45", "granite4": "hermes", "hunyuan_a13b": "jamba", "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic", "minimax_m2": "minimax", "openai": "harmony", "phi4_mini_json": "granite",
    "qwen3_xml": "qwen3_coder",
}  # fmt: skip
PARSERS_OF_SGLANG = {
    "deepseekv3": "deepseek", "deepseekv31": "deepseek", "glm": "glm45", "gpt-oss": "harmony", "llama3": "llama3_json",
    "minimax-m2": "minimax", "qwen": "hermes", "qwen25": "hermes",
}  # fmt: skip
REASONING_PARSERS_OF_VLLM = {
    "deepseek_r1": "think", "glm45": "think", "olmo3": "think", "openai_gptoss": "harmony", "qwen3": "think",
}  # fmt: skip
REASONING_PARSERS_OF_SGLANG = {
    "deepseek-r1": "think", "deepseek-v3": "think", "gpt-oss": "harmony", "qwen3-thinking": "think",
}  # fmt: skip
MAX_WORKERS = 64
_ORIGIN = re.compile(r"https?://[^\s/?#@*]+")  # as browsers send it: without a path
_URL = re.compile(r"https?://[^\s/?#]+\S*")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Flags of ``serve`` for HTTP.

    Raises:
        ConfigError: a value is out of range.
    """

    http: str | None = option(
        None,
        "serve OpenAI's and Anthropic's APIs at HOST:PORT, :PORT (on 127.0.0.1; port 0 is any free one) or unix:PATH "
        "(also --host and --port)",
    )
    http_workers: int = option(1, "number of gateway processes, all at the same address")
    served_model_name: tuple[str, ...] = option(
        (), "the model's name in the API; by default its own. May be given several times"
    )
    api_key: str | None = option(
        None, "key required from clients, as bearer token or x-api-key; better a file or the environment", secret=True
    )
    api_key_file: str | None = option(None, "a file with keys accepted from clients, one per line")
    ssl_certfile: str | None = option(
        None, "serve HTTPS with the certificate (and those between it and its authority) in this PEM file"
    )
    ssl_keyfile: str | None = option(None, "its private key, if that is not in the same file")
    ssl_ca_certs: str | None = option(
        None, "PEM file with authorities: a client needs a certificate of one of them to connect"
    )
    allowed_origin: tuple[str, ...] = option(
        (), "origin allowed by CORS, scheme://host[:port] or *; by default none. May be given several times"
    )
    max_body_bytes: int = option(8 << 20, "maximum size of an HTTP request")
    body_timeout_s: float = option(30.0, "time for the headers, and then the body, of an HTTP request to arrive")
    request_timeout_s: float | None = option(None, "time limit for answering an HTTP request; by default none")
    keep_alive_s: float = option(75.0, "how long an idle HTTP connection is kept open")
    stream_interval: int = option(1, "minimum tokens per streamed event, except for the first and the last one")
    resume_s: float = option(60.0, "how long a resumable answer is kept for its client; see docs/http.md")
    lora_root: str | None = option(
        None, "folder below which POST /v1/load_lora_adapter may load adapters; by default that route is closed"
    )
    sampling_defaults: str = option(
        "model",
        "where temperature, top_p, top_k, min_p and repetition_penalty come from if a request leaves them out: "
        "model (its generation_config.json) or openai (temperature 1)",
    )
    tool_parser: str = option("auto", f"{', '.join(TOOL_PARSERS)}; auto derives it from the chat template")
    reasoning_parser: str = option("auto", f"{', '.join(REASONING_PARSERS)}; auto derives it from the chat template")
    otlp_traces_endpoint: str | None = option(None, "OTLP/HTTP endpoint that receives a span per stage of a request")
    log_format: str = option("text", f"format of the log: {', '.join(LOG_FORMATS)}")

    def __post_init__(self) -> None:
        between("http_workers", self.http_workers, 1, MAX_WORKERS)
        between("max_body_bytes", self.max_body_bytes, 1 << 10, 1 << 30)
        between("body_timeout_s", self.body_timeout_s, 0.1, 1e6)
        between("keep_alive_s", self.keep_alive_s, 0, 1e6)
        between("stream_interval", self.stream_interval, 1, 1 << 20)
        between("resume_s", self.resume_s, MIN_LEASE_S, MAX_LEASE_S)
        if "" in self.served_model_name:
            raise ConfigError("served_model_name is empty", param="served_model_name")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{name} needs ssl_certfile, the server's own certificate", param=name)
        for origin in self.allowed_origin:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                text = f"allowed_origin is {origin!r}, must be scheme://host[:port] or *"
                raise ConfigError(text, param="allowed_origin")
        if self.otlp_traces_endpoint is not None and not _URL.fullmatch(self.otlp_traces_endpoint):
            text = f"otlp_traces_endpoint is {self.otlp_traces_endpoint!r}, must be http[s]://host[:port]/path"
            raise ConfigError(text, param="otlp_traces_endpoint")
        between("request_timeout_s", self.request_timeout_s, 0.01, 1e9)
        for field, known, alias_of in (
            ("tool_parser", TOOL_PARSERS, PARSERS_OF_VLLM | PARSERS_OF_SGLANG),
            ("reasoning_parser", REASONING_PARSERS, REASONING_PARSERS_OF_VLLM | REASONING_PARSERS_OF_SGLANG),
            ("sampling_defaults", SAMPLING_DEFAULTS, SAMPLING_DEFAULTS_OF_VLLM),
        ):
            given = getattr(self, field)
            object.__setattr__(self, field, alias_of.get(given, given))
            one_of(field, getattr(self, field), known)
        one_of("log_format", self.log_format, LOG_FORMATS)

    @property
    def is_tls(self) -> bool:
        return self.ssl_certfile is not None

    def check_names(self, model: ModelConfig) -> None:
        """
        Raises:
            ConfigError: an adapter has the model's name, so requests could not tell them apart.
        """
        own = self.served_model_name or (model.model,)
        for module in model.adapters:
            if module.name in own:
                text = f"lora_modules has an adapter {module.name!r}, which is the model's name"
                raise ConfigError(text, param="lora_modules")

    def check_lora_root(self) -> None:
        """
        Raises:
            ConfigError: it is not a folder, so no adapter could ever be loaded.
        """
        if self.lora_root == "":
            raise ConfigError("lora_root is empty", param="lora_root")
        if self.lora_root is not None and (why := _why_no_folder(Path(self.lora_root))):
            raise ConfigError(f"lora_root {self.lora_root} {why}", param="lora_root")

    def api_keys(self) -> tuple[str, ...]:
        """Every key that is accepted; empty: no key is required.

        Raises:
            ConfigError: the file cannot be read, is not UTF-8 or contains no key.
        """
        # A key that reaches the environment from a file often ends in a newline.
        keys = [] if self.api_key is None else [self.api_key.rstrip("\r\n")]
        if self.api_key_file is not None:
            keys += _read_keys(Path(self.api_key_file))
        if any(not key.strip() for key in keys):
            raise ConfigError("api_key is empty", param="api_key")
        return tuple(keys)


def is_known_key(given: bytes, keys: tuple[str, ...]) -> bool:
    """Whether ``given`` is one of the keys, in constant time."""
    # A list: any() on a generator would stop at the matching key.
    matches = [hmac.compare_digest(given, key.encode(errors="surrogateescape")) for key in keys]
    return any(matches)


def _read_keys(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error.strerror}", param="api_key_file") from error
    except UnicodeDecodeError:  # without the text, which contains keys
        raise ConfigError(f"api_key_file {path} is {why_file_not_utf8(content)}", param="api_key_file") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file {path} contains no key", param="api_key_file")
    return keys


def _why_no_folder(path: Path) -> str | None:
    try:
        mode = mode_of(path)
    except OSError as error:  # as in a folder that is somebody else's
        return f"cannot be read: {error.strerror}"
    if mode is None:
        return "does not exist"
    return None if stat.S_ISDIR(mode) else "is not a directory"
