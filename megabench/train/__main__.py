"""`python -m megabench.train` is the same command as launch/pretrain.py."""

from megabench.train.main import main

if __name__ == "__main__":
    main()
