"""Benchmarks of pyllama_dflash; see README.md. They use the public API only."""
