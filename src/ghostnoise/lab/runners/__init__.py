"""Runners execute the jobs of a sweep: in worker processes on this machine, or on a Ray cluster."""

from ghostnoise.lab.runners.job import Ended, Event, Job, Place, Progressed, Runner, Started

__all__ = ["Ended", "Event", "Job", "Place", "Progressed", "Runner", "Started"]
