"""`python -m learner RECIPE`: the same as `dapo learner RECIPE`."""

from common.cli import main

if __name__ == "__main__":
    main("learner")
