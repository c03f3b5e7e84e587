"""Diagnosis of a study: find untrustworthy, preliminary or slow results in its records. Does not import torch.

A rule reports a finding only if a record contains the evidence. Rules ignore record fields that are None.
"""

from megabench.doctor.examine import examine
from megabench.doctor.finding import Finding

__all__ = ["Finding", "examine"]
