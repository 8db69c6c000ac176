"""The figure of Slurm's jobs over the run, on the wall clock as all that is said of Slurm. Pure."""

from __future__ import annotations

from typing import Any

from hybridsched.report.figure import IDLE, MIXED, OFFLINE, ONLINE, Figure
from hybridsched.report.record import JobRun, RunRecord, SlurmRecord


def job_figures(record: RunRecord) -> list[Figure]:
    """The timeline of the jobs; nothing for a run without Slurm."""
    return [] if record.slurm is None or not record.slurm.jobs else [_timeline(record, record.slurm)]


def _timeline(record: RunRecord, slurm: SlurmRecord) -> Figure:
    run = record.together
    names = list(dict.fromkeys(_name(job) for job in slurm.jobs))

    def at(seconds: float) -> float:
        return round(seconds - run.start_s, 3)

    extra = {one.online_job for one in slurm.reclaims}

    def colour(job: JobRun) -> str:
        if job.id in extra:
            return MIXED
        return OFFLINE if job.partition == slurm.partition_offline else ONLINE

    last = max([run.end_s, *(job.end_s or 0.0 for job in slurm.jobs)])
    bars: list[tuple[JobRun, float, float, str, str]] = []
    for job in slurm.jobs:
        start = job.start_s if job.start_s is not None else job.end_s or last
        if start > job.submit_s:
            bars.append((job, job.submit_s, start, IDLE, "waits"))
        if job.start_s is not None:
            words = f"run {job.run} on {job.node}"
            if job.end_s is not None:
                words += f", then {job.state}"
            bars.append((job, job.start_s, job.end_s or last, colour(job), words))
    data: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "y": [_name(job) for job, *_ in bars],
        "base": [at(start) for _, start, *_ in bars],
        "x": [round(end - start, 3) for _, start, end, *_ in bars],
        "marker": {"color": [tone for *_, tone, _ in bars]},
        "text": [words for *_, words in bars],
        "textposition": "none",
        "hovertemplate": "%{y}: %{text}, from %{base:.1f} s<extra></extra>",
        "showlegend": False,
    }
    return Figure(
        key="slurm-jobs",
        title="Over time",
        caption="Each job from its submission on: waiting, then running; a job that was requeued waits and "
        "runs again. Seconds of the wall clock: Slurm does not run faster with the engines. Before 0 "
        "all comes up, after the trace it is taken down.",
        data=[data],
        layout={
            "barmode": "overlay",
            "xaxis": {"title": {"text": "wall clock from the start of the trace, s"}},
            "yaxis": {
                "type": "category",
                "autorange": "reversed",
                "categoryorder": "array",
                "categoryarray": names,
                "showgrid": False,
            },
            "margin": {"l": 190},
        },
        height=110 + 24 * max(2, len(names)),
        legend=(
            (ONLINE, "online replica"),
            (OFFLINE, "offline job"),
            (MIXED, "extra online job"),
            (IDLE, "waits"),
        ),
    )


def _name(job: JobRun) -> str:
    return f"{job.name} {job.id}"
