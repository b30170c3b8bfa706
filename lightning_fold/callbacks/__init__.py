"""Callbacks that report on a run: utilisation, expert load, pictures at its end."""

from lightning_fold.callbacks.expert_load import ExpertLoadMonitor
from lightning_fold.callbacks.flops import ModelShape
from lightning_fold.callbacks.mfu import MFUMonitor
from lightning_fold.callbacks.peak import register_device
from lightning_fold.callbacks.report import RunReport, summarise
from lightning_fold.callbacks.start import ValidateAtStart
from lightning_fold.callbacks.timeline import PipelineTimeline

__all__ = [
    "ExpertLoadMonitor",
    "MFUMonitor",
    "ModelShape",
    "PipelineTimeline",
    "RunReport",
    "ValidateAtStart",
    "register_device",
    "summarise",
]
