import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference.philox import NOISE_RANGE, gumbel_noise, philox4x32

WORD = st.integers(0, 2**32 - 1)
WORDS = st.tuples(WORD, WORD, WORD, WORD)

# From the known-answer tests of Random123, the authors' library: counter, key, output.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(expected)


@given(st.lists(WORDS, min_size=1, max_size=5), WORD, WORD)
def test_int64_tensors_compute_what_unbounded_integers_do(
    counters: list[tuple[int, ...]], k0: int, k1: int
) -> None:
    columns = torch.tensor(counters).unbind(1)
    actual = torch.stack(philox4x32(columns, (k0, k1)), 1).tolist()
    assert actual == [list(philox4x32(counter, (k0, k1))) for counter in counters]


def test_noise_is_a_function_of_seed_position_and_token_only() -> None:
    tokens = torch.arange(1000)
    whole = gumbel_noise(2**64 - 1, 7, tokens)
    some = torch.tensor([999, 0, 500])
    assert torch.equal(gumbel_noise(2**64 - 1, 7, some), whole[some])
    for seed, position in [
        (2**64 - 2, 7),
        (2**63 - 1, 7),
        (2**32 - 1, 7),
        (2**64 - 1, 8),
        (2**64 - 1, 7 + 2**32),
    ]:
        assert not torch.isclose(gumbel_noise(seed, position, tokens), whole).any()


def test_noise_of_known_counters() -> None:
    """Pinned: what was streamed before an upgrade must continue after it."""
    noise = gumbel_noise(42, 3, torch.tensor([0, 1, 49151]))
    word = philox4x32((1, 0, 3, 0), (42, 0))[0]
    assert (
        noise[1] == (-torch.log(-torch.log(torch.tensor((word + 0.5) / 2**32, dtype=torch.float64)))).float()
    )
    torch.testing.assert_close(
        noise, torch.tensor([-1.1666432619094849, 0.4309663772583008, 0.6068095564842224])
    )


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(5, 0, torch.arange(200_000)).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert noise.var().item() == pytest.approx(1.6449, abs=0.03)  # pi^2 / 6
    assert noise.max() - noise.min() < NOISE_RANGE
