"""A gateway process's view of its pipeline: files of the run directory, read once they exist, and a client."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...driver.async_client import AsyncClient
from ...driver.first_epochs import first_epochs
from ...protocol.board import FAILED, RUN, Board
from ...protocol.config import PipelineConfig
from ...protocol.model_card import LatestCard, ModelCard
from ...protocol.run_dir import board_path, follow_endpoint, read_config, submit_endpoint
from ...protocol.tokenizer_files import TokenizerFacts, load_facts, load_tokenizer_json
from .config import GatewayConfig
from .errors import ApiError, gone
from .health import health, is_loaded
from .page.feed import Feed
from .reasoning.thoughts import find_reasoning_parser
from .requests.words import Words
from .serving.api_keys import ApiKeys
from .serving.counters import Counters
from .serving.tracing import Tracer
from .serving.uploads import Uploads
from .tools.parser import find_parser


@dataclass
class Gateway:
    """Everything shared by the routes. Created in the event loop's thread, before the first request."""

    config: GatewayConfig
    run_dir: Path
    index: int = 0  # among the gateway processes of one pipeline
    tracer: Tracer = field(default_factory=Tracer)
    uploads: Uploads = field(default_factory=Uploads)
    created: int = field(default_factory=lambda: int(time.time()))
    open_prompts: dict[str, bool] = field(default_factory=dict)  # whether they end inside the reasoning: see reasoning

    @cached_property
    def pipeline(self) -> PipelineConfig:
        return read_config(self.run_dir)

    @cached_property
    def _first_epochs(self) -> dict[str, int]:
        return first_epochs(self.run_dir)

    @cached_property
    def board(self) -> Board:
        return Board(board_path(self.run_dir))

    @cached_property
    def client(self) -> AsyncClient:
        run_dir, service = self.run_dir.absolute(), self.pipeline.service
        submit, follow = submit_endpoint(run_dir, service), follow_endpoint(run_dir, service)
        return AsyncClient(run_dir, submit=submit, follow=follow)

    @cached_property
    def feed(self) -> Feed:
        """The data of the live page."""
        return Feed(self)

    @cached_property
    def counters(self) -> Counters:
        return Counters(self.run_dir, self.index)

    @cached_property
    def api_keys(self) -> ApiKeys:
        return ApiKeys(self.config)

    @cached_property
    def _latest_card(self) -> LatestCard:
        return LatestCard(self.run_dir)

    @property
    def card(self) -> ModelCard:
        """The model card; only once the model is loaded. Changes if execute restarts with other weights or adapters."""
        card = self._latest_card.read()
        assert card is not None, "a loaded model has a card"
        return card

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """Values for sampling that requests leave out, by their names in ``SamplingParams``."""
        of_model = self.card.sampling if self.config.sampling_defaults == "model" else {}
        return {"temperature": 1.0, **of_model}

    @cached_property
    def facts(self) -> TokenizerFacts:
        facts = load_facts(self.run_dir)
        assert facts is not None, "a loaded model has its tokenizer beside its card"
        return facts

    @cached_property
    def words(self) -> Words:
        """The tokenizer. Loaded on first use: most requests are tokenized only by the pipeline.

        Raises:
            ApiError: 503, the run directory was deleted before.
        """
        if not self.board.is_in_place:
            raise gone(self.run_dir)
        return Words(Tokenizer.from_str(load_tokenizer_json(self.run_dir)))

    async def load_words(self) -> Words:
        """The tokenizer, loaded in a thread if it has to be."""
        return await asyncio.to_thread(lambda: self.words)

    @cached_property
    def tool_parser(self) -> str:
        """The format of this model's tool calls; "none" if it is unknown."""
        return find_parser(self.config.tool_parser, self.facts.chat_template or "")

    @cached_property
    def reasoning_parser(self) -> str:
        """The format of this model's reasoning; "none" if it has none."""
        return find_reasoning_parser(self.config.reasoning_parser, self.facts.chat_template or "")

    def get_ready(self) -> None:
        """Open what requests need. The connections of a first burst may take all files that this process may open."""
        _ = self.client
        if self.is_loaded:
            _ = self.tool_parser, self.reasoning_parser, self.card

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model itself."""
        return self.config.served_model_name or (self.pipeline.model.model,)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters offered."""
        if self._latest_card.read() is None:
            return tuple(module.name for module in self.pipeline.model.adapters)
        return tuple(self._latest_card.offered())

    def folder_of(self, adapter: str) -> Path | None:
        """The adapter's folder; None if there is no such adapter."""
        modules = read_config(self.run_dir).model.adapters
        return next((module.folder for module in modules if module.name == adapter), None)

    def adapter_option(self, model: str) -> dict[str, str]:
        """The pipeline's option for the adapter that ``model`` names, if any."""
        return {"lora": model} if model not in self.model_names and model in self.adapters else {}

    @property
    def is_loaded(self) -> bool:
        """Also of a pipeline whose run directory was deleted: its workers, if they live, need nothing from there."""
        if not self.board.is_in_place:
            return self._latest_card.read() is not None
        return is_loaded(self.board, self.run_dir, self._first_epochs)

    @property
    def is_gone(self) -> bool:
        """Whether the pipeline will not answer again, as its run directory was deleted and a worker is missing."""
        return not self.board.is_in_place and self.health()["status"] != "ok"

    def health(self) -> dict[str, Any]:
        return health(self.board, self.run_dir, self.pipeline)

    def check_ready(self) -> None:
        """
        Raises:
            ApiError: 503, the model is not loaded yet or the pipeline is stopping. A restarting worker is no reason:
                requests wait until it is back.
        """
        if self.board.mode not in (RUN, FAILED):  # first: a stop removes what shows that the model was loaded
            raise ApiError("the pipeline is stopping and takes no new requests", status=503, code="draining")
        if self.is_gone:
            raise gone(self.run_dir)
        if not self.is_loaded:
            raise ApiError("the model is being loaded, try again later", status=503, code="loading")
        if self.board.mode == FAILED:
            raise ApiError("the pipeline gave up restarting a worker, see /health", status=503, code="failed")

    def ready_model(self, name: str | None) -> str:
        """The name of the model to use in the reply, once requests are taken.

        Raises:
            ApiError: as ``check_ready`` and ``check_model``.
        """
        self.check_ready()
        return self.check_model(name)

    def check_model(self, name: str | None) -> str:
        """The name to use in the reply.

        Raises:
            ApiError: 404, no such model is served.
        """
        if name is None or name in self.model_names or name in self.adapters:
            return name or self.model_names[0]
        known = ", ".join((*self.model_names, *self.adapters))
        raise ApiError(
            f"the model {name!r:.200} is not served here, known are: {known}",
            status=404,
            code="model_not_found",
            param="model",
        )
