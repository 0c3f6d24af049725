"""`python -m verifier RECIPE`: the same as `dapo verifier RECIPE`."""

from common.cli import main

if __name__ == "__main__":
    main("verifier")
