"""CUDA kernels in CUDA C++: compiled by NVRTC, and called by programs."""
