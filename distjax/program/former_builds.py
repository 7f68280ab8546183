"""Builds for objects that the user has since put others in the place of: they may come back."""

from __future__ import annotations

import collections
import weakref

from distjax.program.launch import Build

#: How many builds are kept whose variables are all in use by a later one.
_MAX_KEPT = 8


class FormerBuilds:
    """The builds of one program that were replaced since the function reached other objects.

    A former build lives as long as a variable that only it threads, which keeps it: a program may
    live for ever, and must not keep the model of each fold.
    """

    def __init__(self) -> None:
        self._builds: list[weakref.ref[Build]] = []
        self._kept: collections.deque[Build] = collections.deque(maxlen=_MAX_KEPT)
        self._latest: Build | None = None  # until it is replaced, for good

    @property
    def is_replacing(self) -> bool:
        """Whether a build has been put away, and there is no other yet."""
        return self._latest is not None

    def exchange(self, build: Build | None) -> Build | None:
        """Puts a build away; returns the one for what is there now, if there is one."""
        if build is not None:
            self._latest = build
        self._builds = [ref for ref in self._builds if ref() is not None]
        builds = [self._latest, *(ref() for ref in self._builds)]
        found = next((b for b in builds if b is not None and b.reached.is_the_same()), None)
        if found is not None:
            self.replace_by(found)
        return found

    def replace_by(self, build: Build) -> None:
        """Records what was made or found in place of the build that was put away."""
        former, self._latest = self._latest, None
        if former is None or former is build:
            return
        if all(ref() is not former for ref in self._builds):
            self._builds.append(weakref.ref(former))
        own = [v for v in former.variables if v not in {*build.variables}]
        if not own:
            self._kept.append(former)
            return
        # By the list of builds, so that it ends with the program, too.
        kept = vars(own[0]).setdefault("_builds", weakref.WeakKeyDictionary())
        kept.setdefault(self, []).append(former)
