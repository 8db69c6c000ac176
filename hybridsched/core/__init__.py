"""Values and decisions. Pure: no Redis, HTTP, NVML, Slurm, clock, configuration file or randomness.

Time is always an argument. The policy worker, the twin and the replay of a decision log run this code.
"""
