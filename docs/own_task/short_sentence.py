"""Is a response one sentence about a topic, of at most so many words?  Gold: "LIMIT TOPIC"."""

import re

from verifier.outcome import Verdict

WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
FEWEST = 4
"""Words of the shortest sentence that counts: `Rain falls.` would be the easy way out."""


def check(response: str, gold: str, **options: object) -> Verdict:
    """`options` has what a verifier says about the sample (`truncated` and others): not needed."""
    limit, topic = gold.split()  # a gold of another form raises: the outcome is "error"
    text = response.strip()
    if not text:
        return Verdict("no_answer", reason="empty")
    words = [word.lower() for word in WORD.findall(text)]
    refusals = {
        "not one line": "\n" in text,
        "not one sentence": not re.fullmatch(r"[A-Z][^.!?]*[.!?]", text),
        "not about the topic": topic not in words,
        "repeats itself": len(words) - len(set(words)) > 2,
        "too short": len(words) < FEWEST,
        "too long": len(words) > int(limit),
    }
    why = next((reason for reason, true in refusals.items() if true), "")
    return Verdict("wrong" if why else "correct", extracted=text, reason=why)
