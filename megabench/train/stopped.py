"""Why a run ends early without being wrong about anything: a sentence, no traceback, exit status 1."""


class StoppedError(Exception):
    """The run cannot go on, or did not keep what it should; every rank raises it at the same step."""
