"""Settings for every test, and for the processes that tests start."""

from __future__ import annotations

import os

# Set before torch is imported: models in tests are tiny, and on a busy machine a second thread is only waited for.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
