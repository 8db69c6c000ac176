"""The twin: a day of a cluster on a virtual clock, in seconds.

Parts, from the inside out:

- `engine.TwinEngine`: one vLLM engine by counts of tokens. It behaves as `engines.simulated.scheduler` under
  `EngineLoop` does (the same iterations, first tokens, ends, preemptions), but does not go iteration by
  iteration where nothing changes: a run of decode-only iterations of the same sequences has a closed form
  (`engines.simulated.perf.run_ms`), and each sequence in it is only the number of the iteration that ends it.
- `request`, `blocks`: a request without its tokens, and the KV cache without its blocks.
- `clock.Loop`: the events, on a virtual clock: deterministic, seeded, nothing global.
- `trace`, `lengths`: online traces at another load, and the lengths of offline work.
- `pool.Pool`: replicas that pull (`replica`, `queue`, `online`, by `core.routing`), lanes that pause
  (`lane`, `executor`, `feed`, by `core.lane`, `core.admission`, `core.pacing`, `core.chunking`), and the
  policy worker (`policy`, by `core.decide` and `core.cycles`). `latencies` stand for what lies between them.
- `meter`: what the report is made of, counted while it happens.
- `ceiling`: what offline work could come to at most.

What is approximated against `Scheduler`: every answer runs to its full length (`ignore_eos`); the prefix
cache knows one prefix per `cache_key` and shares nothing between requests that run at the same time; pooling
requests and the pause modes other than `keep` are left out. Everything else is equal, and a property test
holds it so.

What is approximated against the live pool: the ways between its parts take the time that they took in some
runs (`latencies`); nothing fails; a lane's record holds its present numbers with the age of the last one
published; all online requests are of one class and live equally long; a chunk's size follows the lane that
plans it, and every lane plans when it takes one.
"""
