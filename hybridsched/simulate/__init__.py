"""`hybridsched simulate`: inputs read and checked, the twin run, and the demo's report made of it."""
