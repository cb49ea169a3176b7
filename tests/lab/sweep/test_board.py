import io

from rich.console import Console

from ghostnoise.lab.sweep.board import Board, duration
from ghostnoise.lab.sweep.tally import Running, Tally


def test_the_table_has_the_counts_and_a_bar_for_each_run():
    tally = Tally(finished=3, waiting=2, worked=3, now=lambda: 30.0, since=0.0)
    tally.running["a"] = Running("GNI seed 0", "worker 1", done=5, total=10, loss=1.5, accuracy=42.0, begun=5)
    console = Console(file=io.StringIO(), width=100)
    console.print(Board(tally, console, quiet=False).render())
    first, second = console.file.getvalue().splitlines()
    assert first == "3 finished, 1 running, 2 waiting; 25 s left"  # 2 and a half, at 10 s each
    assert second.split()[:3] == ["GNI", "seed", "0"]
    assert "loss 1.500 accuracy 42.0 % worker 1" in second


def test_durations_are_short():
    assert [duration(seconds) for seconds in (0.04, 9.9, 59, 119, 120, 7199, 7200)] == [
        "0.0 s", "9.9 s", "59 s", "119 s", "2 min", "120 min", "2 h",
    ]  # fmt: skip
