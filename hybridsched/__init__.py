"""Online LLM requests first, bulk inference in the measured gaps, on one Slurm GPU cluster."""

__version__ = "0.1.0"
