"""Answer checking, reward shaping and the dynamic-sampling filter.

The rule-based checkers are pure functions; whatever can hang runs in a killable process
(`verifier.pool`). Importing this package loads nothing heavy.
"""
