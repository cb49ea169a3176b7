import pytest

from ghostnoise.bench import cost


def test_the_table_in_the_documentation_is_up_to_date(pytestconfig):
    """Write it again with `python -c "from ghostnoise.bench import cost; print(cost.markdown())"`."""
    assert cost.markdown() in (pytestconfig.rootpath / "results" / "bench" / "README.md").read_text()


def test_passes_over_x():
    """Two reads and a write forward; four reads and a write backward; noise alone has a read and a write backward."""
    elements = 8 * 4 * 6 * 6
    assert cost.cost("BN", (8, 4, 6, 6)).passes == cost.cost("nn.BatchNorm2d, cuDNN", (8, 4, 6, 6)).passes
    assert cost.cost("BN", (8, 4, 6, 6), itemsize=2).passes == (3 + 5) * elements * 2
    assert cost.cost("GNI", (8, 4, 6, 6)).passes == (3 + 2) * elements * 4


def test_larger_ghost_batches_gather_more():
    small, large = (cost.cost("BN+GNI", (64, 8, 4, 4), ghost_size=size).tables for size in (8, 16))
    assert large - small == 64 * 8 * 8 * 16


@pytest.mark.parametrize("method", cost.LAUNCHES)
def test_a_prediction_is_launches_and_bytes(method):
    found = cost.cost(method, (64, 8, 4, 4))
    assert found.seconds(1e12, launch=0.0) == pytest.approx((found.passes + found.tables) / 1e12)
    assert found.seconds(1e30, launch=1.0) == pytest.approx(sum(cost.LAUNCHES[method]))
