"""Orders are exact bijections, the same in NumPy and in device code, and without visible bias."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warpwell as ww
from warpwell import gpu
from warpwell.errors import ArgumentError
from warpwell.kv import permutation as p
from warpwell.kv.permutation import Permutation, permuted
from warpwell.targets import has_cuda


@ww.kernel
def permute(positions, parameters, out):
    i = gpu.grid(1)
    if i < positions.size:
        out[i] = permuted(positions[i], parameters)


@given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_every_position_stands_in_the_order_once(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch).slice(0, size)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 2**14, 2**14 + 1, 100_003, 2**17])
def test_sizes_around_powers_of_two_and_blocks(size: int) -> None:
    order = Permutation(size, 5).slice(0, size)
    assert np.array_equal(np.sort(order), np.arange(size))


@given(st.integers(1, p.MAX_SIZE), st.integers(0, 2**63), st.data())
def test_huge_orders_stay_inside_and_do_not_collide(size: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    values = Permutation(size, seed)(positions)
    assert ((values >= 0) & (values < size)).all()
    assert len(set(values.tolist())) == len(positions)


@settings(max_examples=30)
@given(st.integers(1, 3000), st.data())
def test_a_part_is_the_same_alone_and_in_the_whole(size: int, data: st.DataObject) -> None:
    order = Permutation(size, 1, 2)
    complete = order.slice(0, size)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert np.array_equal(order.slice(start, stop), complete[start:stop])
    assert order(start % size) == complete[start % size] and order(start % size).shape == ()
    assert np.array_equal(order(np.arange(size)[::-1].reshape(1, -1)), complete[::-1].reshape(1, -1))


def test_the_order_is_part_of_the_format() -> None:
    """A run that resumes with a later version must keep its order."""
    assert Permutation(10, 0, 0).slice(0, 10).tolist() == [4, 3, 8, 7, 9, 5, 6, 1, 0, 2]
    assert Permutation(1797, 7, 3)([0, 1, 2, 1000, 1796]).tolist() == [349, 483, 1747, 1095, 946]
    huge = Permutation(2**62, -1, 9)([0, 2**61, 2**62 - 1])
    assert huge.tolist() == [260121656436785536, 3069064409032716232, 1909299979986644330]


def test_seeds_and_epochs_give_orders_of_their_own() -> None:
    named = itertools.product(range(-5, 15), range(20))
    orders = {tuple(Permutation(50, seed, epoch).slice(0, 50).tolist()) for seed, epoch in named}
    assert len(orders) == 400


@pytest.mark.quick("3")
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_orders_of_few_positions_are_equally_frequent(size: int) -> None:
    trials, orders = 4000, math.factorial(size)
    code = size ** np.arange(size)
    counts = np.zeros(size**size)
    for seed in range(trials):
        counts[Permutation(size, seed).slice(0, size) @ code] += 1
    assert np.count_nonzero(counts) == orders
    chi2 = ((counts[counts > 0] - trials / orders) ** 2 / (trials / orders)).sum()
    assert abs(chi2 - (orders - 1)) < 5 * math.sqrt(2 * (orders - 1))


def test_no_place_and_no_neighbor_is_preferred() -> None:
    size, trials = 40, 3000
    position_counts, neighbors = np.zeros((size, size)), np.zeros((size, size))
    for epoch in range(trials):
        order = Permutation(size, 11, epoch).slice(0, size)
        position_counts[np.arange(size), order] += 1
        neighbors[order[:-1], order[1:]] += 1
    expected = trials / size
    chi2, freedom = ((position_counts - expected) ** 2 / expected).sum(), (size - 1) ** 2
    assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)
    off_diagonal = neighbors[~np.eye(size, dtype=bool)]
    chi2, freedom = ((off_diagonal - expected) ** 2 / expected).sum(), size * (size - 1) - 1
    assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("device", ["interp", "cpu", "cuda"])
@pytest.mark.parametrize("size", [1, 37, 1797, 2**33 + 5, p.MAX_SIZE])
def test_device_code_gives_the_same_order(device: str, size: int) -> None:
    if device == "cuda" and not has_cuda():
        pytest.skip("needs a GPU")
    order = Permutation(size, 3, 4)
    positions = np.unique(np.linspace(0, size - 1, 60).astype(np.int64).clip(0, size - 1))
    out = np.zeros(positions.size, np.int64)
    permute[positions.size](positions, order.words, out, device=device)
    assert np.array_equal(out, order(positions))


@pytest.mark.parametrize("size", [0, -1, p.MAX_SIZE + 1])
def test_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(ArgumentError, match="positions"):
        Permutation(size)


@pytest.mark.parametrize("position", [-1, 10, 2**62])
def test_positions_outside(position: int) -> None:
    with pytest.raises(ArgumentError, match="this order has positions 0 to 9"):
        Permutation(10)(position)
    assert Permutation(10)([]).shape == (0,)
