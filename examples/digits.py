"""Write digits.jsonl beside this file: strings of 4 to 9 digits, to be sorted in ascending order.

Small enough for a laptop, and exact: an answer with one digit out of place is wrong.
"""

import json
import random
from pathlib import Path

COUNT, SHORTEST, LONGEST = 6_000, 4, 9


def main() -> None:
    """Distinct strings, the same ones every time."""
    rng = random.Random(0)
    texts: dict[str, None] = {}
    while len(texts) < COUNT:
        texts["".join(rng.choices("0123456789", k=rng.randint(SHORTEST, LONGEST)))] = None
    lines = (json.dumps({"prompt": f"{text}=", "answer": "".join(sorted(text))}) for text in texts)
    Path(__file__).with_name("digits.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
