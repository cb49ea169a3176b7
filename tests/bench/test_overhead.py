from ghostnoise.bench import overhead


def test_planning_is_timed_over_as_many_points_as_asked_for(tmp_path):
    timed = overhead.planning(240, tmp_path, seeds=2)
    assert timed.count == 400  # 100 rates by 2 decays by 2 seeds: the grid is filled up
    assert timed.expansion > 0
    assert timed.scan > 0
    assert len(list((tmp_path / "digits").iterdir())) == timed.count
