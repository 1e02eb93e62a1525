"""``python -m swpipe``: the command line."""

from swpipe.cli import main

if __name__ == "__main__":
    main()
