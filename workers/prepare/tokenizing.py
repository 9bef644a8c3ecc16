"""From a request to its tokens: at once if that is quick, else in a thread; a suspect only while nothing else is."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ...protocol.errors import RequestError, TokenizationFailed
from ...protocol.model_card import ModelCard
from ..process import WorkerContext
from .admission import Admission, admit, embedding_size_of, with_instruction
from .grammar_checker import GrammarChecker
from .grammar_queue import GrammarQueue
from .intake import Intake
from .job_thread import JobThread
from .quotas import Quotas
from .suspects import Suspects
from .text_encoder import TextEncoder

logger = logging.getLogger(__name__)
Result = Admission | RequestError


class Tokenizing:
    """Takes requests and returns each once, through ``done``, with its tokens or with an error.

    Records an intent for each text being processed: if the process dies, the driver knows which requests to suspect.
    """

    def __init__(
        self,
        context: WorkerContext,
        card: ModelCard,
        encoder: TextEncoder,
        quotas: Quotas,
        *,
        ring: Callable[[], None],
        done: Callable[[Intake, Result], None],
    ) -> None:
        """``ring`` ends the wait before the next ``turn``, and may be called from any thread."""
        service = context.config.service
        self._context, self._card, self._encoder, self._quotas = context, card, encoder, quotas
        self._ring, self._done = ring, done
        self._timeout_s = service.tokenize_timeout_s
        self._grammars = GrammarQueue(
            GrammarChecker(context.run_dir, timeout_s=service.grammar_timeout_s, memory_bytes=service.grammar_bytes)
        )
        self._job_thread: JobThread[Result] = JobThread(self._timeout_s, ring=ring)
        self._for_next_turn: deque[Callable[[], None]] = deque()
        self.pending_bytes = 0  # of requests that wait for the compiler or in the tokenizer thread
        self.suspects = Suspects(context.board)
        self._solo: Intake | None = None  # a suspect that waits for the compiler or is in the tokenizer thread
        self._in_threads: list[int] = []  # digests, including those in abandoned threads until these finish
        self._threads_lock = threading.Lock()  # guards that list and the intent derived from it

    def has_to_wait(self, key: int) -> bool:
        """Whether other work is in progress and this request, or that work, is a suspect to be processed alone.

        Raises:
            Poisoned: a request with this content is known to crash workers.
        """
        is_suspect = self.suspects.check(key)
        return self._solo is not None or (is_suspect and self.pending_bytes > 0)

    def begin(self, intake: Intake) -> None:
        if (form := intake.request.structured) is not None:
            self._begin_wait(intake)
            self._grammars.compile(
                intake.owner, form, lambda result: self._later(lambda: self._compiled(intake, result))
            )
        else:
            self._tokenize_soon(intake)

    def turn(self) -> None:
        """Return what other threads have finished."""
        self._job_thread.collect()
        while self._for_next_turn:
            self._for_next_turn.popleft()()

    def close(self) -> None:
        self._job_thread.close()
        self._grammars.close()

    def _later(self, work: Callable[[], None]) -> None:
        """Do this in the next turn. Thread-safe."""
        self._for_next_turn.append(work)
        self._ring()

    def _compiled(self, intake: Intake, result: str | RequestError) -> None:
        self._end_wait(intake)
        if self._solo is intake:
            self._solo = None
        if isinstance(result, RequestError):
            self._done(intake, result)
        else:
            intake.grammar = result
            self._tokenize_soon(intake)

    def _begin_wait(self, intake: Intake) -> None:
        self.pending_bytes += intake.num_bytes
        self._quotas.waits(intake.owner, intake.num_bytes)
        if intake.digest in self.suspects:  # what came meanwhile would be in progress at the same time
            self._solo = intake

    def _end_wait(self, intake: Intake) -> None:
        self.pending_bytes -= intake.num_bytes
        self._quotas.waited(intake.owner, intake.num_bytes)

    def _tokenize_soon(self, intake: Intake) -> None:
        if intake.is_long:
            self._tokenize_in_thread(intake)
            return
        self._context.intent.set_standing([intake.digest])
        self._done(intake, self._tokenize(intake))
        self._context.intent.set_standing([])
        self.suspects.clear(intake.digest)

    def _tokenize_in_thread(self, intake: Intake) -> None:
        self._begin_wait(intake)

        def done(result: Result | None) -> None:
            self._end_wait(intake)
            if self._solo is intake:
                self._solo = None
                if result is not None:
                    self.suspects.clear(intake.digest)
            self._done(intake, result or self._too_slow(intake))

        self._job_thread.submit(intake.owner, lambda: self._tokenize_with_intent(intake), done)

    def _tokenize_with_intent(self, intake: Intake) -> Result:
        with self._threads_lock:
            self._in_threads.append(intake.digest)
            self._context.intent.set_others(self._in_threads)
        result = self._tokenize(intake)
        with self._threads_lock:
            self._in_threads.remove(intake.digest)
            self._context.intent.set_others(self._in_threads)
        return result

    def _too_slow(self, intake: Intake) -> RequestError:
        param = "prompt" if intake.request.messages is None else "messages"
        return TokenizationFailed(
            f"{param} took longer than {self._timeout_s} s, the limit is tokenize_timeout_s", param=param
        )

    def _tokenize(self, intake: Intake) -> Result:
        """Thread-safe. A request that cannot be served is an error only for its own client."""
        intake.tokenize_start_ns = self._context.journal.now_ns()
        try:
            request = intake.request
            embedding_size = embedding_size_of(request, self._card)
            token_ids = self._encoder.encode_request(with_instruction(request, self._card))
            admission = admit(
                token_ids,
                truncation=request.truncation,
                params=request.sampling,
                card=self._card,
                max_prompt_tokens=request.max_prompt_tokens,
                embedding_size=embedding_size,
            )
            intake.continues_prompt = self._encoder.is_continued(request, admission.token_ids)
            if request.tells_reasoning:
                intake.reasoning = self._encoder.reasoning_after(
                    admission.token_ids,
                    budget=request.thinking_token_budget,
                    or_call=request.structured is not None and request.structured.or_call,
                )
            return admission
        except RequestError as error:
            return error
        except BaseException as error:  # a panic of the tokenizer's Rust code is not an Exception
            logger.exception("request %s could not be prepared", intake.request_id)
            return RequestError(f"the request could not be prepared: {type(error).__name__}")
        finally:
            intake.tokenize_end_ns = self._context.journal.now_ns()
