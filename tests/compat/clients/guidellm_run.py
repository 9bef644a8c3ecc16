"""guidellm drives the gateway: ``python guidellm_run.py http://127.0.0.1:8000 [model] [tokenizer folder]``.

It must be installed for the Python that runs this. Chats and completions, one at a time and eight at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from checks import run

NUM_REQUESTS = 16
NAMES = ("len", "abs", "sum", "print")
QUESTIONS = [f"What does {NAMES[i % len(NAMES)]} do?" for i in range(NUM_REQUESTS)]
TOKENIZER = Path(__file__).parents[3] / "launch" / "demo_model" / "checkpoint"


def benchmark(url: str, model: str, path: str, profile: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prompts, report = Path(folder, "prompts.csv"), Path(folder, "report.json")
        prompts.write_text("prompt\n" + "\n".join(QUESTIONS), encoding="utf-8")
        command = [
            str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={url},model={model},request_format={path}",
            "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
            "--data", f"kind=csv_file,path={prompts}",
            "--profile", profile,
            "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        [found] = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals
    assert found["metrics"]["output_token_count"]["successful"]["mean"] > 0


def chats(url: str, model: str) -> None:
    benchmark(url, model, "/v1/chat/completions", "kind=synchronous")


def completions_eight_at_a_time(url: str, model: str) -> None:
    benchmark(url, model, "/v1/completions", "kind=concurrent,streams=8")


if __name__ == "__main__":
    url, model = [*sys.argv[1:], "demo"][:2]
    run(f"guidellm {version('guidellm')}", [chats, completions_eight_at_a_time], url, model)
