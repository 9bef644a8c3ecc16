"""Native kernels for CPUs: C++ compiled on the machine that runs it, and called through ctypes."""
