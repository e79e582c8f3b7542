"""The choice of a peer for a request."""

import random
from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from pagewire.wire.streams import Affinity, balancing


@given(keys=st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=200), count=st.integers(1, 6))
def test_a_peer_that_goes_moves_its_own_requests_only_and_no_peer_has_too_many(keys: list[bytes], count: int) -> None:
    peers = [SimpleNamespace(address=f"10.0.0.{number}:1", load=0, last_choice=0) for number in range(count)]
    before = {key: balancing.choose(peers, Affinity(key, key)) for key in keys}
    if count > 1:
        after = {key: balancing.choose(peers[1:], Affinity(key, key)) for key in keys}
        assert all(after[key] is before[key] for key in keys if before[key] is not peers[0])
    for key in keys:
        balancing.choose(peers, Affinity(key, key)).load += 1
    assert max(peer.load for peer in peers) <= max(8, 1.25 * (len(keys) + 1) / count + 1)


def test_what_begins_alike_is_together_unless_all_do() -> None:
    peers = [SimpleNamespace(address=f"10.0.0.{number}:1", load=0, last_choice=0) for number in range(4)]
    popularity, draw = balancing.Popularity(), random.Random(1)
    found: dict[bytes, Counter[str]] = {}
    for number in range(2000):
        beginning = b"popular" if draw.random() < 0.6 else b"%d" % draw.randrange(40)
        affinity = Affinity(beginning, b"%d" % (number % 400))
        chosen = balancing.choose(peers, affinity, popularity.seen(beginning))
        if number >= 1000:
            found.setdefault(beginning, Counter())[chosen.address] += 1
    popular = found.pop(b"popular")
    assert len(popular) == 4 and max(popular.values()) < 0.4 * popular.total()
    assert all(len(addresses) == 1 for addresses in found.values())
