"""What three processes cost compared with one on a GPU: ``pipeline_overhead.py`` on the 0.6B shape."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.gpu.setting import Notes, Setting, require
from benchmarks.sequences import make_engine
from triptych.protocol.config import PipelineConfig
from triptych.workers.execute.model.build import build_runner


def processes(setting: Setting, note: Notes) -> None:
    require("zmq", "msgpack")
    from benchmarks import pipeline_overhead  # here, because it needs both
    from triptych import Driver

    folder = setting.checkpoint("qwen3-0.6b")
    config = PipelineConfig.from_options(
        model=str(folder),
        device=setting.device.type,
        backend="transformers" if setting.is_dry else "fused",
        max_model_len=setting.size(2048, 128),
        num_pages=setting.size(2_000, 64),  # 15 GB; both the driver's worker and the runner here have that many
    )
    with tempfile.TemporaryDirectory() as run_dir, Driver(config=config) as driver:
        runner, card = build_runner(
            config.model, config.cache, config.scheduler, model_dir=folder, run_dir=Path(run_dir),
        )  # fmt: skip
        runner.warm_up()
        runner.capture_graphs()
        engine = make_engine(runner, card, config.scheduler, depth=0 if setting.is_dry else 1)
        for name, batch in (("batch_32", setting.size(32, 2)), ("batch_1", 1)):  # results shown in the table come first
            work = pipeline_overhead.Work(batch, output_tokens=setting.size(400, 6))
            note(name, pipeline_overhead.compare(engine, driver, work, setting.size(3, 1)))
