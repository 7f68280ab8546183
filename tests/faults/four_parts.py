"""Says of an error whether it has the four parts that every message of distjax has."""


def is_explained(error):
    """Returns whether the text says what was expected, what came, why, and the fix."""
    expected, _, rest = str(error).partition("\n  Got: ")
    got, _, rest = rest.partition("\n  Why: ")
    why, _, fix = rest.partition("\n  Fix: ")
    return all(part.strip() for part in (expected, got, why, fix))


def fix_of(error):
    """Returns the last part of the text of an error."""
    return str(error).partition("\n  Fix: ")[2]
