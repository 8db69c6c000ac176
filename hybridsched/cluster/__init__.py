"""Slurm behind one small protocol: by its commands, by pyslurm, and a fake for tests."""
