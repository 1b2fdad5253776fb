"""Benchmarks: attention, whole tokens and memory on a CPU or a GPU, and what a machine allows at best."""
