"""Native kernels for CPUs: C++ that is compiled on the machine it runs on, reached by ctypes."""
