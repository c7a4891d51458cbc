"""Measurements to run by hand, ``python -m benchmarks.NAME`` from the root; results: docs/benchmarks.md."""
