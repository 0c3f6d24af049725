"""The learner: turns accepted groups into optimizer steps and weights for the generators.

`advantage`, `loss` and `batch` are pure; `policy` is the model with its log-probs; `engine` is the
only file that knows DeepSpeed. Importing this package loads none of the heavy libraries.
"""
