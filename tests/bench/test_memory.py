import torch
from torch import nn

from ghostnoise.bench import memory
from ghostnoise.bench.contenders import Contender
from ghostnoise.bench.rows import Row

CPU = torch.device("cpu")
ROW = Row((16, 8, 4, 4))


class Keeps(torch.autograd.Function):
    """The identity; saves x, a table of 100 floats twice, and holds 50 more where autograd does not look."""

    @staticmethod
    def forward(ctx, x, state):
        table = x.new_ones(100)
        ctx.save_for_backward(x, table, table[:10], state)
        ctx.hidden = x.new_ones(50)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        large = torch.ones(3, *dy.shape)
        return dy * large[0], None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.ones(1000))

    def forward(self, x):
        return Keeps.apply(x, self.state)


def test_each_storage_is_counted_once_and_state_not_at_all():
    x, _ = ROW.draw(CPU)
    assert memory.saved(Contender("", "peer", Layer()), x) == (x.nbytes, 400)


def test_what_is_held_beside_autograd_is_counted_too():
    x, _ = ROW.draw(CPU)
    assert memory.held(Contender("", "peer", Layer()), x) == 400 + 200


def test_peak_is_the_most_at_a_time():
    x, dy = ROW.draw(CPU)
    # y, the tables, the three of the backward, and the gradient that is made beside them
    assert memory.peak(Contender("", "peer", Layer()), x, dy) == x.nbytes * 5 + 600


def test_plain_batch_norm_keeps_x_and_two_vectors():
    x, dy = ROW.draw(CPU)
    contender = Contender("", "torch", nn.BatchNorm2d(8))
    contender.step(x, dy)()
    assert memory.saved(contender, x) == (x.nbytes, 64)
    assert memory.held(contender, x) == 64
