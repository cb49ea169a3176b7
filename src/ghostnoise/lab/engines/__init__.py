"""What runs the jobs of a sweep: worker processes on this machine, or a Ray cluster."""

from ghostnoise.lab.engines.job import Ended, Engine, Event, Job, Place, Progressed, Started

__all__ = ["Ended", "Engine", "Event", "Job", "Place", "Progressed", "Started"]
