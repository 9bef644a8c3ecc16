"""The parts of ``gpu_check.py``: each measures one thing, in a separate process."""
