"""A simulation of vLLM: its HTTP API, metric names and scheduling; iteration times from published profiles.

No model runs here. The text is invented, the times are computed; every answer is labelled as simulated.
"""
