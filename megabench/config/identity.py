"""The identity of a trial, with which a resumed study finds its existing results. Loads no torch."""

import hashlib

from megabench.config.run_config import RunConfig
from megabench.settings.setting import names
from megabench.specs.all_settings import SETTINGS


def identity(run: RunConfig, **more: object) -> str:
    """Return the hash of `more` and of all settings that affect the result, i.e. no output paths and no monitoring.

    Settings without a value are left out, so that a new setting does not change the identity of runs without it.
    """
    left_out = {*names(SETTINGS, role="output"), *names(SETTINGS, role="watch")}
    kept = {name: value for name, value in run.flat(mode="json").items() if name not in left_out}
    every = {**kept, **run.spec.recorded(run.options), **more}
    fields = {name: value for name, value in every.items() if value is not None}
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]
