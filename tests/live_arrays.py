"""Arrays that a piece of code makes and leaves alive."""

import contextlib

import jax


@contextlib.contextmanager
def no_new_arrays(but=0):
    """At most `but` arrays are alive afterwards that were not before.

    Those from before are held: a count would differ where another test's garbage goes in between.
    """
    before = jax.live_arrays()
    yield
    held = {id(x) for x in before}
    assert len([x for x in jax.live_arrays() if id(x) not in held]) <= but
