"""`python -m generator RECIPE`: the same as `dapo generator RECIPE`."""

from common.cli import main

if __name__ == "__main__":
    main("generator")
