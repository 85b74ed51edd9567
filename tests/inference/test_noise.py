import numpy as np
import pytest

from fusion.inference.noise import philox4x32, request_key, uniforms


@pytest.mark.parametrize(
    "counter, key, want",
    [  # the known answers of Random123's kat_vectors
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, want):
    words = philox4x32(np.array(counter, np.uint64)[:, None].repeat(3, 1), key)
    assert (words == np.array(want, np.uint64)[:, None]).all()


def test_a_number_depends_on_seed_request_and_position_only():
    keys = np.array([request_key(f"r{i}") for i in range(50)], np.uint64)
    positions = np.arange(50)
    together = uniforms(7, keys, positions)
    alone = np.concatenate([uniforms(7, keys[i : i + 1], positions[i : i + 1]) for i in range(50)])
    assert (together == alone).all()
    for other in (uniforms(8, keys, positions), uniforms(7, keys, positions + 1), uniforms(7, keys[::-1], positions)):
        assert (other != together).all()
    assert (uniforms(7, keys, positions, stream=1) != together).all()


def test_request_keys_are_the_same_in_every_process():
    assert request_key("prompt-3/sample-1") == 17779290655169470882


def test_numbers_are_uniform_over_requests_and_over_positions():
    keys = np.array([request_key(f"r{i}") for i in range(20000)], np.uint64)
    for draws in (
        uniforms(1, keys, np.zeros(20000, np.int64)),
        uniforms(1, keys[:1].repeat(20000), np.arange(20000)),
    ):
        assert draws.min() >= 0 and draws.max() < 1
        counts = np.histogram(draws, 100, (0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 149  # chi-square, 99 degrees of freedom: 0.999 quantile
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
