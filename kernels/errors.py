"""What goes wrong through the user's kernels file or compiler, not through this project."""


class KernelsError(Exception):
    """A kernels file, or the compiler for it, cannot be used; `str(error)` is one line.

    `detail` holds a compiler's whole message where there is one, to be shown beneath that line.
    """

    def __init__(self, message: str, detail: str | None = None) -> None:
        super().__init__(message)
        self.detail = detail
