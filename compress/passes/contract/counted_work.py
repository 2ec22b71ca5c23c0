"""Passes that count their work before they run, so that a plan predicts their time."""

from __future__ import annotations

from compress.roofline.work import Work


class CountedWork:
    """An optional second base of a layer pass whose work depends on the shapes of the layers alone."""

    def shared_work(self, width: int) -> Work:
        """Count the work that is done once for all layers that read the same input, in every process.

        Args:
            width: channels of the input.
        """
        return Work()

    def work(self, shape: tuple[int, int]) -> Work | None:
        """Count the work of solving a layer (out, in), without `shared_work`; None: it is not counted."""
        return None
