from ghostnoise.engine.backends.base import Latest


def test_the_latest_values_of_a_key_come_first():
    latest = Latest[int]()
    assert latest.get("key") == ()
    for value in range(2 * latest.PER_KEY):
        latest.add("key", value)
    assert latest.get("key") == tuple(range(2 * latest.PER_KEY - 1, latest.PER_KEY - 1, -1))
    assert latest.get("other") == ()


def test_keys_do_not_grow_without_bound():
    latest = Latest[int]()
    for key in range(latest.KEYS):
        latest.add(key, key)
    assert latest.get(0) == (0,)
    latest.add("last", 1)
    assert latest.get(0) == ()
    assert latest.get("last") == (1,)
