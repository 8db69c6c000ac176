"""Whether a job's GPUs can be used. As in slurm/prolog.sh, only proof counts, and it is sought twice.

Inside a job less is proof than in the prolog: a container or a cgroup may hide a GPU, or number it otherwise,
and a program may find other libraries than the node's. What is not seen counts only where the engine has used
it from the same place; of the rest the prolog of the next job judges.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Mapping, Sequence

from hybridsched.core.values import Value

BROKEN = frozenset({8, 9, 11, 15, 16})
"""Exit statuses of nvidia-smi, which are NVML's: no power, no driver, no interrupts, lost, to be reset."""

NOT_FOUND = 6

KEPT_BYTES = 262_144
"""Many times what the largest node says (16 GPUs with 7 MIG instances each: 10 kB)."""

_WORDS = ("requires reset", "requires restart", "gpu is lost", "fallen off the bus")
_GPU = re.compile(r"gpu (\d{1,4}): .*\(uuid: (gpu-[^)]+)\)")
_MIG = re.compile(r"\s+mig .*\(uuid: (mig-[^)]+)\)")


class Verdict(Value, frozen=True, kw_only=True):
    """`broken` None: nobody can tell."""

    broken: bool | None
    why: str = ""


class Listing(Value, frozen=True, kw_only=True):
    """What `nvidia-smi -L` said, in small letters."""

    gpus: dict[int, str]
    """UUIDs by number."""
    migs: tuple[str, ...]
    whole: bool
    """Nothing else can be there."""
    lost: bool = False
    """It says that a GPU is broken; perhaps one of others."""

    def number(self, uuid: str) -> int | None:
        """The GPU whose UUID begins so."""
        return next((number for number, one in self.gpus.items() if one.startswith(uuid)), None)

    def has_mig(self, mig: str) -> bool | None:
        """Whether the instance is listed; None: it may be there under a name of the other form.

        Forms: MIG-UUID, and MIG-GPU-UUID/GI/CI with drivers before 470.
        """
        # A UUID may be given by its beginning; the numbers of the old form may not.
        if mig in self.migs or ("/" not in mig and any(one.startswith(mig) for one in self.migs)):
            return True
        if not self.migs:
            return False
        if any(one.startswith("mig-gpu-") for one in self.migs):
            return False if mig.startswith("mig-gpu-") else None
        if mig.startswith("mig-gpu-"):
            return None if self.number(mig.removeprefix("mig-").partition("/")[0]) is not None else False
        return False


def read_listing(status: int, said: str, *, cut: bool = False) -> Listing:
    """Read the answer to `nvidia-smi -L`. `cut`: it said more than `said`."""
    gpus: dict[int, str] = {}
    migs: list[str] = []
    whole = status == 0 and not cut
    for line in filter(str.strip, said.lower().splitlines()):
        if found := _GPU.match(line):
            gpus[int(found[1])] = found[2]
        elif found := _MIG.match(line):
            migs.append(found[1])
        else:
            whole = False
    if status == NOT_FOUND:
        return Listing(gpus={}, migs=(), whole=True)
    lost = status in BROKEN or _lost_words(said)
    return Listing(gpus=gpus, migs=tuple(migs), whole=whole and bool(gpus), lost=lost)


def job_gpus(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The GPUs that Slurm gave to this process's job."""
    env = os.environ if environ is None else environ
    text = env.get("CUDA_VISIBLE_DEVICES") or env.get("SLURM_JOB_GPUS", "")
    return tuple(part.strip() for part in text.split(",") if part.strip())


async def probe_gpus(
    gpus: Sequence[str],
    *,
    probe: str = "nvidia-smi",
    timeout_s: float = 10.0,
    pause_s: float = 1.0,
    used: bool = False,
) -> Verdict:
    """Probe once, and once more where it says broken: one failure may be a driver in the middle of something.

    `probe` other than nvidia-smi is a site's own, called with the GPUs: exit status 0 usable, 1 broken,
    everything else cannot be told. `used`: an engine has run on these GPUs from here, so that what is not
    seen any more is gone.
    """
    if not gpus:
        return Verdict(broken=None, why="the job has no GPU")
    verdict = await _probe(gpus, probe, timeout_s, used)
    if verdict.broken:
        await asyncio.sleep(pause_s)
        verdict = await _probe(gpus, probe, timeout_s, used)
    return verdict


async def _probe(gpus: Sequence[str], probe: str, timeout_s: float, used: bool) -> Verdict:
    if os.path.basename(probe) != "nvidia-smi":  # noqa: PTH119 - a name to be found on PATH
        status, said, _ = await _run([probe, *gpus], timeout_s)
        broken = {0: False, 1: True}.get(-1 if status is None else status)
        return Verdict(broken=broken, why=f"{probe} ended with {status}: {_short(said)}")
    status, said, cut = await _run([probe, "-L"], timeout_s)
    if status is None:
        return Verdict(broken=None, why=f"nvidia-smi -L: {_short(said)}")
    listing = read_listing(status, said, cut=cut)
    for gpu in gpus:
        verdict = await _probe_one(gpu.lower(), len(gpus), listing, probe, timeout_s, used)
        if verdict.broken is not False:
            return verdict
    return Verdict(broken=False)


async def _probe_one(
    gpu: str, count: int, listing: Listing, probe: str, timeout_s: float, used: bool
) -> Verdict:
    proof = listing.lost or (listing.whole and used)
    if gpu.startswith("mig-"):
        there = listing.has_mig(gpu)
        if there is None:
            return Verdict(broken=None, why=f"nvidia-smi names MIG instances in another form than {gpu}")
        return Verdict(broken=False) if there else _gone(gpu, proof)
    if gpu.startswith("gpu-"):
        found = listing.number(gpu)
        if found is None:
            return _gone(gpu, proof)
        number = found
    elif re.fullmatch(r"[0-9]{1,4}", gpu):
        if listing.migs:
            return Verdict(broken=None, why=f"{gpu} may count MIG instances, which have no such number")
        number = int(gpu)
        # The numbers may be others in here. Fewer GPUs than the job was given say it without them.
        proof = listing.lost or (proof and len(listing.gpus) < count)
    else:
        return Verdict(broken=None, why=f"{gpu} is no GPU that nvidia-smi could be asked for")
    query = [probe, "-i", str(number), "--query-gpu=uuid", "--format=csv,noheader"]
    status, said, _ = await _run(query, timeout_s)
    why = f"GPU {gpu}: nvidia-smi ended with {status}: {_short(said)}"
    if status is None:
        return Verdict(broken=None, why=why)
    if status in BROKEN or _lost_words(said):
        return Verdict(broken=True, why=why)
    if status == NOT_FOUND and number not in listing.gpus:
        return _gone(gpu, proof)
    return Verdict(broken=False if status == 0 else None, why=why)


def _gone(gpu: str, proof: bool) -> Verdict:
    return Verdict(broken=True if proof else None, why=f"{gpu} is not there")


def _lost_words(said: str) -> bool:
    return any(word in said.lower() for word in _WORDS)


def _short(said: str) -> str:
    return " ".join(said[:400].split())


async def _run(argv: Sequence[str], timeout_s: float) -> tuple[int | None, str, bool]:
    """Exit status and words of a command, and whether it said more. None: not there, refused, not in time."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return None, str(error), False
    try:
        async with asyncio.timeout(timeout_s):
            out, cut = await _read(process.stdout)
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # One that hangs in the driver cannot be killed, and is not waited for.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await process.wait()
        return None, f"no answer within {timeout_s:g} s", False
    return process.returncode, out.decode("utf-8", "replace"), cut


async def _read(pipe: asyncio.StreamReader | None) -> tuple[bytes, bool]:
    """All that is said, up to `KEPT_BYTES`; whether there was more."""
    kept, cut = bytearray(), False
    while pipe is not None and (part := await pipe.read(65_536)):
        room = KEPT_BYTES - len(kept)
        kept += part[:room]
        cut = cut or len(part) > room
    return bytes(kept), cut
