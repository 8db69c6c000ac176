"""Engines: one protocol; vLLM over HTTP, the simulated vLLM, and a fake for tests."""
