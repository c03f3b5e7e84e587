"""Convert checkpoints from and to Hugging Face format.

The same command as `megabench convert`, for a checkout that is not installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import megabench from this checkout

from megabench.cli import main

if __name__ == "__main__":
    main("convert")
