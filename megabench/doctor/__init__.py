"""The doctor: what makes a study's numbers untrustworthy or slow, from its records alone. Loads no torch.

A rule speaks only where a record holds the evidence; a field that is None is no evidence.
"""

from megabench.doctor.examine import examine
from megabench.doctor.finding import Finding

__all__ = ["Finding", "examine"]
