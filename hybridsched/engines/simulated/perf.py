"""How long one engine iteration takes, from a published profile. Pure, apart from reading its file."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path

import msgspec

DEFAULT_PROFILE = "a100-llama3-8b"


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of the hinge formula, with where they come from. Milliseconds and tokens.

    The hinge says that a batch below `n0` tokens costs the same as one token: the weights are read once
    whatever the batch, and only beyond `n0` does arithmetic take longer than that read.
    """

    name: str
    model: str
    hardware: str
    tensor_parallel: int
    layers: int
    source: str
    commit: str
    licence: str
    kind: str
    """Whether it is an end-to-end measurement or a sum of measured parts."""
    what: str
    excluded: str
    grid: str
    points: int
    formula: str
    a: float
    n0: float
    b: float
    c: float
    d: float
    e: float
    error: dict[str, float]
    r2: float

    def iteration_ms(
        self,
        *,
        prefill_tokens: int,
        batch_decode: int,
        total_context: int,
        prefill_pairs: int | None = None,
    ) -> float:
        """Milliseconds of one iteration.

        Args:
            prefill_tokens: prompt tokens computed in it.
            batch_decode: sequences that decode one token in it.
            total_context: sum of the decoding sequences' lengths.
            prefill_pairs: for each prompt slice of `c` tokens after `p` earlier ones, c*(c + 2p), summed. The
                quadratic term of the profile is the attention of one whole prompt, where this is
                prefill_tokens squared (the default); for slices and for several prompts in one
                iteration the sum is what that attention costs.
        """
        tokens = prefill_tokens + batch_decode
        if prefill_pairs is None:
            prefill_pairs = prefill_tokens * prefill_tokens
        over = tokens - self.n0
        return (
            self.a
            + (self.b * over if over > 0 else 0.0)
            + self.c * batch_decode
            + self.d * total_context
            + self.e * prefill_pairs
        )

    def decode_ms(self, batch_decode: int) -> tuple[float, float]:
        """Milliseconds of a decode-only iteration: a constant, and what each token of context adds.

        The same sequences are `batch_decode` tokens longer in the next iteration, so a run of them is the
        sum of an arithmetic series: see `run_ms`.
        """
        return self.iteration_ms(prefill_tokens=0, batch_decode=batch_decode, total_context=0), self.d


def run_ms(first_ms: float, growth_ms: float, iterations: int) -> float:
    """Milliseconds of a run of decode-only iterations: the first, and what each adds to the one before."""
    return iterations * first_ms + growth_ms * (iterations * (iterations - 1) / 2)


def run_iterations(first_ms: float, growth_ms: float, within_ms: float) -> int:
    """The fewest iterations of such a run (at least 1) that last `within_ms` or longer.

    The inverse of `run_ms`, and exact to it: the root of the quadratic is only where the search starts.
    """
    if within_ms <= first_ms:
        return 1
    if growth_ms > 0.0:
        half = first_ms - growth_ms / 2
        count = int((math.sqrt(half * half + 2 * growth_ms * within_ms) - half) / growth_ms)
    else:
        count = int(within_ms / first_ms)
    # The root is rounded down, and its error is far below one iteration: one less is certainly too short.
    while count * first_ms + growth_ms * (count * (count - 1) / 2) < within_ms:
        count += 1
    return count


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    folder = files(__package__).joinpath("profiles")
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def load_profile(name: str) -> Profile:
    """The profile called `name`, or the one in the JSON file at that path.

    Raises:
        ValueError: no such profile, or the file is not one.
    """
    try:
        if name.endswith(".json"):
            raw = Path(name).read_bytes()
        elif name in profile_names():
            raw = files(__package__).joinpath("profiles", f"{name}.json").read_bytes()
        else:
            known = ", ".join(profile_names())
            raise ValueError(f"profile {name!r} is unknown; use one of {known}, or the path of a .json file")
        return msgspec.json.decode(raw, type=Profile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"profile {name!r} cannot be read: {error}") from error
