"""Where the time of a start goes: of the first one, and of one after it, as after a crash. Each is a process."""

from __future__ import annotations

import cProfile
import json
import pstats
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Notes, Setting

NAME = "qwen3-0.6b"
NUM_FUNCTIONS = 40


def loading(setting: Setting, note: Notes) -> None:
    """Of Qwen3-0.6B: seconds of imports, of the model and of its graphs, and the functions in which most of them were
    spent, with what they call.
    """
    setting.checkpoint(NAME)
    command = [sys.executable, "-m", "benchmarks.gpu.loading", str(setting.folder), *["--dry-run"] * setting.is_dry]
    for start in ("again",) if setting.is_dry else ("first", "again"):
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        if done.returncode:
            raise SystemExit(f"the {start} start ended with exit code {done.returncode}: {done.stderr[-2000:]}")
        note(start, json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    start = time.perf_counter()
    from benchmarks.gpu.runs import load

    import_s = time.perf_counter() - start
    profile = cProfile.Profile()
    loaded = profile.runcall(load, Setting(Path(sys.argv[1]), is_dry="--dry-run" in sys.argv), NAME)
    seconds = {"import_s": import_s, "load_s": loaded.load_s, "capture_s": loaded.capture_s}
    print(json.dumps({**seconds, "functions": longest(profile)}))


def longest(profile: cProfile.Profile) -> dict[str, float]:
    """Seconds of the functions that took the most, by file, line and name."""
    stats: Any = pstats.Stats(profile)
    seconds = {
        f"{'/'.join(Path(file).parts[-2:])}:{line} {name}": round(found[3], 3)
        for (file, line, name), found in stats.stats.items()
    }
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:NUM_FUNCTIONS])


if __name__ == "__main__":
    main()
