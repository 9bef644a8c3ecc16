"""The parts of a pipeline that a driver holds in its own process, from the run directory to the supervisor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ..protocol.board import RUN, Board
from ..protocol.config import PipelineConfig
from ..protocol.run_dir import board_path, check_socket_paths, follow_endpoint, submit_endpoint
from .adapters import LoadedAdapters
from .blame import Blame
from .client import Client
from .control import ControlServer
from .deaths import Death
from .first_epochs import note_first_epochs
from .journal_keeper import JournalKeeper
from .lasting_memory import ExecuteMemory
from .orphans import end_orphans
from .preparing import check_trace, prepare_keys, prepare_run_dir, writing
from .run_dir import RunDir
from .socket_files import SocketFiles
from .stand_in import PUBLIC_ROLES, StandIn
from .supervisor import Supervisor

Stop: TypeAlias = Literal["drain", "abort", "keep"]


class StandIns:
    """Answer clients in place of the workers that were given up."""

    def __init__(self, run_dir: Path, config: PipelineConfig, board: Board) -> None:
        self._run_dir, self._config, self._board = run_dir, config, board
        self._open: list[StandIn] = []

    def replace(self, role: str) -> None:
        """In the supervisor's thread."""
        if role in PUBLIC_ROLES:
            self._open.append(StandIn(role, self._run_dir, self._config.service, self._board))

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


@dataclass(slots=True, eq=False)
class Parts:
    """What a driver has from its start to its stop."""

    config: PipelineConfig  # as it is at the start, with the adapters that an earlier driver has loaded
    run_dir: RunDir
    keeper: JournalKeeper
    board: Board
    memory: ExecuteMemory
    client: Client
    supervisor: Supervisor
    sockets: SocketFiles
    stand_ins: StandIns
    control: ControlServer | None = None  # started last
    hurry: Stop | None = None  # of a stop that does not wait for answers: ends the drain of another thread


def open_parts(
    given_run_dir: Path | None,
    config: PipelineConfig,
    loaded: LoadedAdapters,
    undo: ExitStack,
    *,
    close_journal: Callable[[JournalKeeper], None],
) -> Parts:
    """Everything that the workers need to find when they start; ``undo`` closes it again.

    Raises:
        ConfigError: the run directory is in use, unsafe or full, or what is in it does not fit the config.
    """
    check_trace(config.scheduler.trace)
    end_orphans()
    run_dir = RunDir(given_run_dir)
    undo.callback(run_dir.leave)
    check_socket_paths(run_dir.path)
    with writing(run_dir):
        keeper = JournalKeeper(run_dir.path, config)
        undo.callback(close_journal, keeper)
        config = loaded.restore(keeper.path, config)
        prepare_run_dir(run_dir.path, config, keeper)
        prepare_keys(run_dir.path, config)
        board = Board(board_path(run_dir.path))
        undo.callback(board.close)
        note_first_epochs(run_dir.path, board)
        memory = ExecuteMemory(run_dir.path)
        undo.callback(memory.close)
    board.set_mode(RUN)
    client = Client(
        run_dir.path,
        submit=submit_endpoint(run_dir.path, config.service),
        follow=follow_endpoint(run_dir.path, config.service),
    )
    undo.callback(client.close)
    stand_ins = StandIns(run_dir.path, config, board)
    undo.callback(stand_ins.close)
    blame = Blame(board, keeper.journal)
    sockets = SocketFiles(run_dir.path, config.service, board, on_deleted=client.session.fail_unless_connected)

    def on_death(death: Death) -> int:
        keeper.check_after(death)  # first: to blame a request is to write into the journal
        memory.note_death(death, is_degraded=board.is_degraded)
        return blame.note_death(death)

    def on_vacancy(role: str) -> None:
        memory.note_vacancy(role)
        stand_ins.replace(role)

    supervisor = Supervisor(
        run_dir.path,
        board,
        config.supervisor,
        on_give_up=client.fail,
        on_death=on_death,
        on_vacancy=on_vacancy,
        on_look=sockets.look,
    )
    return Parts(config, run_dir, keeper, board, memory, client, supervisor, sockets, stand_ins)
