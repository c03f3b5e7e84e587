"""The kinds of question that a study asks."""

from typing import Literal

Question = Literal["fastest", "parity", "days", "scaling", "memory", "sweep"]
