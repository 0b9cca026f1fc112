"""Compiles the kernels into images; never shipped, never imported at run time."""


class BuildError(RuntimeError):
    """The build cannot go on; the text says what was needed, what came, and what to do."""
