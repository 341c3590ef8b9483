"""Dead letters: records that no attempt could handle, where they lie, and how they are handed over again."""
