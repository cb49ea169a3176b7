import asyncio
import contextvars
import threading

import pytest
import torch
from ghostnoise.engine.backends import select
from ghostnoise.engine.backends.aten import ATEN, Aten

import ghostnoise


@pytest.fixture(autouse=True)
def _own_context():
    """Choices without a block last: each test starts and ends without any."""
    token = select._choices.set(())
    yield
    select._choices.reset(token)


class Fast(Aten):
    """A backend that is available, and refuses tensors whose last stride is not 1."""

    name = "native"
    reason = None

    def unavailable(self):
        return self.reason

    def refuses(self, x):
        return None if x.stride(-1) == 1 and x.device.type == "cpu" else "positions are not adjacent"


@pytest.fixture
def fast(monkeypatch):
    """The backend that "native" is, on machines with and without a compiler."""
    made = Fast()
    monkeypatch.setattr(select, "load", lambda name: made if name == "native" else ATEN)
    return made


@pytest.mark.usefixtures("fast")
def test_a_choice_and_a_block():
    ghostnoise.backend("aten")
    assert select.chosen() == "aten"
    with ghostnoise.backend("native"):
        assert select.chosen() == "native"
        with ghostnoise.backend("auto"):
            assert select.chosen() == "auto"
        assert select.chosen() == "native"
    assert select.chosen() == "aten"


def test_a_choice_can_be_entered_later_and_again():
    made = [ghostnoise.backend(name) for name in ("aten", "auto", "auto")]
    assert select.chosen() == "auto"
    for _ in range(2):
        with made[0]:
            assert select.chosen() == "aten"
        assert select.chosen() == "auto"


def test_a_block_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), ghostnoise.backend("aten"):
        _ = 1 / 0
    assert select.chosen() == "auto"


def test_choices_without_a_block_supersede_each_other():
    for _ in range(100):
        ghostnoise.backend("aten")
        ghostnoise.backend("auto")
    assert select.chosen() == "auto"
    assert len(select._choices.get()) <= 2


@pytest.mark.usefixtures("fast")
def test_a_choice_inside_a_block():
    with ghostnoise.backend("native"):
        ghostnoise.backend("aten")
        assert select.chosen() == "aten"
    assert select.chosen() == "aten"


@pytest.mark.usefixtures("fast")
def test_blocks_that_end_out_of_order():
    first, second = ghostnoise.backend("aten"), ghostnoise.backend("native")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert select.chosen() == "native"
    second.__exit__(None, None, None)
    assert select.chosen() == "auto"


def test_a_block_is_local_to_its_thread():
    seen, entered, done = [], threading.Event(), threading.Event()

    def other():
        seen.append(select.chosen())
        with ghostnoise.backend("aten"):
            entered.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    with ghostnoise.backend("aten"):
        thread.start()
        entered.wait(10)
    assert select.chosen() == "auto"
    done.set()
    thread.join()
    assert seen == ["auto"]
    assert select.chosen() == "auto"


def test_a_choice_is_local_to_its_task():
    async def choose(name, seen):
        with ghostnoise.backend(name):
            await asyncio.sleep(0)
            seen[name] = select.chosen()
            await asyncio.sleep(0)

    async def run():
        seen = {}
        await asyncio.gather(choose("aten", seen), choose("auto", seen))
        return seen

    assert asyncio.run(run()) == {"aten": "aten", "auto": "auto"}
    assert select.chosen() == "auto"


def test_a_copied_context_has_the_choice_of_its_origin():
    with ghostnoise.backend("aten"):
        copied = contextvars.copy_context()
    assert copied.run(select.chosen) == "aten"
    copied.run(ghostnoise.backend, "auto")
    assert select.chosen() == "auto"


def test_auto_takes_the_fastest_that_can_run(fast):
    x = torch.randn(2, 3, 8)
    assert select.select(x) is fast
    assert select.select(x[..., ::2]) is ATEN
    with ghostnoise.backend("aten"):
        assert select.select(x) is ATEN


def test_auto_where_the_fastest_is_not_available(fast):
    fast.reason = "the C++ library was not built"
    assert select.select(torch.randn(2, 3, 8)) is ATEN
    with pytest.raises(RuntimeError, match=r"backend='native' cannot run here: the C\+\+ library was not built"):
        ghostnoise.backend("native")
    assert select.chosen() == "auto"


@pytest.mark.usefixtures("fast")
def test_by_name_and_unable():
    with (
        ghostnoise.backend("native"),
        pytest.raises(RuntimeError, match=r"cannot run this tensor: positions .*; use ghostnoise.backend\('auto'\)"),
    ):
        ghostnoise.GhostNoise(4)(torch.randn(4, 3, 8)[..., ::2])
    with pytest.raises(ValueError, match="backend='cuda': must be one of 'auto', 'aten', 'native', 'triton'"):
        ghostnoise.backend("cuda")


def test_an_empty_part_of_a_shared_batch_runs_anywhere(fast):
    with ghostnoise.backend("native"):
        assert select.select(torch.randn(0, 3, 8)) is fast
        assert select.select(torch.randn(0, 3, 8)[..., ::2]) is ATEN


def test_backward_uses_the_backend_of_forward(fast, monkeypatch):
    x = torch.randn(4, 3, 8, requires_grad=True)
    with ghostnoise.backend("aten"):
        y = ghostnoise.BatchNorm1d(3)(x)
    monkeypatch.setattr(fast, "gradient_sums", None, raising=False)
    y.sum().backward()
    assert x.grad is not None
    with pytest.raises(TypeError):
        ghostnoise.BatchNorm1d(3)(x).sum().backward()


def test_every_name_loads_a_backend_with_that_name():
    for name in select.NAMES[1:]:
        assert select.load(name).name == name
