"""Counts words in two arrays of a saved heap, which survive the program.

Kill it at any time and start it again: it continues at its last checkpoint, and the counts are
those of the words that it has seen by then.

    python counts.py REPOSITORY [WORDS]
"""

import sys

import pagemark

WORDS = 50_000
DIFFERENT_WORDS = 4096
CHECKPOINT_EVERY = 2_000


def word_at(place: int) -> int:
    """The word of an endless text, as a number: it follows from its place."""
    return place * 2_654_435_761 % 2**32 % DIFFERENT_WORDS


def main() -> None:
    repository = pagemark.Repository(sys.argv[1])
    end = int(sys.argv[2]) if len(sys.argv) > 2 else WORDS
    try:
        heap = pagemark.SavedHeap(repository, "counts")
    except pagemark.MechanismError as error:
        print(f"heaps cannot be tracked here: {error}")
        return
    counts = heap.array("counts", DIFFERENT_WORDS, "i8")
    progress = heap.array("progress", 1, "i8")
    begin = int(progress[0])
    print(f"continues at word {begin}" if begin else "a new heap", flush=True)

    # One checkpoint holds both arrays, so that they fit together after a crash at any instant.
    assert int(counts.sum()) == begin
    for place in range(begin, end):
        counts[word_at(place)] += 1
        progress[0] = place + 1
        if progress[0] % CHECKPOINT_EVERY == 0:
            taken = heap.checkpoint()
            print(f"checkpoint {taken.sequence} at word {int(progress[0])}", flush=True)
    heap.checkpoint()
    print(f"{int(counts.sum())} words")


if __name__ == "__main__":
    main()
