"""What every role shares: configuration, wire records, broker, ledger, logs, metrics.

Importing this package loads neither torch nor vllm; the one module that needs torch,
`common.transport`, is imported by the two ends of a weight round and by nobody else.
"""

__version__ = "0.1.0"
