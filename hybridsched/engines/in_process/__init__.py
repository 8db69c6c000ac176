"""vLLM in a process of our own, without a server: for lanes that have an engine to themselves."""
