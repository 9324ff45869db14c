"""`python -m leadout`: the console script without its path."""

from leadout.cli.app import main

if __name__ == "__main__":
    main()
