"""Where metrics go besides the run folder's own file."""

from pathlib import Path
from typing import Any

from ghostnoise.lab.errors import UserError


class TensorBoard:
    """Writes the lines for TensorBoard, into `tensorboard/` in the run folder."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "--tensorboard: the package tensorboard is missing; pip install 'ghostnoise[tensorboard]', or leave "
                "--tensorboard out"
            ) from error
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def record(self, line: dict[str, Any]) -> None:
        """Write every number of a line, at its step."""
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("epoch", "step"):
                self.writer.add_scalar(name, value, line["step"])
        self.writer.flush()
