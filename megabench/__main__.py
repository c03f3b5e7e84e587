"""`python -m megabench` is the same command as `megabench`."""

from megabench.cli import main

if __name__ == "__main__":
    main()
