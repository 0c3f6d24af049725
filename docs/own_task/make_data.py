"""Write train.jsonl and heldout.jsonl of the example into a folder: python make_data.py FOLDER"""

import json
import random
import sys
from pathlib import Path

SYSTEM = "You write one short sentence and nothing else."
QUESTION = "Write one sentence about {topic} in at most {limit} words."
EXAMPLES = (
    (8, "kites", "Red kites dance above the quiet beach."),
    (12, "shadows", "Long shadows fall across the empty street in the evening."),
)
"""Shown as earlier turns: without them the base is hardly ever right, and has nothing to learn."""
LIMITS = (8, 10, 12)
TOPICS = (
    "apples autumn birds books bread bridges butter candles cats chairs cheese chess children "
    "cities clocks clouds coffee cooking dancing deserts doctors dogs dreams eggs engines farmers "
    "fire fish flowers forests friends games gardens glass gold grass hats honey horses houses ice "
    "islands jackets kings lakes lamps letters lions maps markets milk mirrors money mountains "
    "museums music oceans oranges paint paper pianos pirates planets poetry potatoes rabbits rain "
    "rivers roads robots roses salt sand schools sharks shoes silence silver sleep snow soap soup "
    "spiders spring stars stones stories summer tea teachers tigers time towers trains trees "
    "umbrellas violins water wheels whales wind windows winter wolves"
)
HELD_OUT = 16
"""Topics that are asked in the evaluation only."""


def row(topic: str, limit: int) -> dict[str, object]:
    """One problem: a conversation that ends with the user's message, and the gold."""
    messages = [message("system", SYSTEM)]
    for shown_limit, shown_topic, sentence in EXAMPLES:
        messages.append(message("user", QUESTION.format(topic=shown_topic, limit=shown_limit)))
        messages.append(message("assistant", sentence))
    messages.append(message("user", QUESTION.format(topic=topic, limit=limit)))
    return {"prompt": messages, "answer": f"{limit} {topic}"}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write(path: Path, topics: list[str]) -> None:
    rows = [json.dumps(row(topic, limit)) for topic in topics for limit in LIMITS]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    words = TOPICS.split()
    topics = random.Random(0).sample(words, len(words))
    write(folder / "heldout.jsonl", topics[:HELD_OUT])
    write(folder / "train.jsonl", topics[HELD_OUT:])
