"""For tools that look for setup.py; the metadata is in pyproject.toml."""

from setuptools import setup

setup()
